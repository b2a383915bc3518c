"""Plain-text tables."""

from __future__ import annotations

import math

from spiral_mega.telemetry.formatting import FRACTIONS, format_metric


def before_after_table(before: dict[str, float], after: dict[str, float]) -> str:
    """One line a metric: its value before and after, and the change; "-" where a side lacks it.

    Shares (accuracy, pass@k, majority@k, ...) are percentages, and their change is in points. Metrics keep the
    order of `before`, those only in `after` come last.
    """
    names = list(before) + [name for name in after if name not in before]
    rows = [("metric", "before", "after", "change")]
    rows += [(name, _cell(name, before), _cell(name, after), _change(name, before, after)) for name in names]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cell(name: str, values: dict[str, float]) -> str:
    return format_metric(name, values[name]) if name in values else "-"


def _change(name: str, before: dict[str, float], after: dict[str, float]) -> str:
    change = after.get(name, math.nan) - before.get(name, math.nan)
    if not math.isfinite(change):
        return "-"
    if FRACTIONS.search(name):
        return f"{100 * change:+.1f} pts"
    return ("+" if change >= 0 else "") + format_metric(name, change)
