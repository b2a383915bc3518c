"""Format metrics and durations as text."""

from __future__ import annotations

import math
import re

FRACTIONS = re.compile(r"accuracy|(pass|majority|maj)@|^(gated|truncated)/|^batch/effective_share$")


def format_metric(name: str, value: float) -> str:
    """Return `value` as text: a percentage if the name is that of a fraction, else about four digits."""
    if not math.isfinite(value):
        return str(value)
    if FRACTIONS.search(name):
        return f"{100 * value:.1f}%"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds, as 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
