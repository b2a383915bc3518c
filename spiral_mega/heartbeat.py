"""Signs of life of this rank: whatever works calls `beat`, and `watchdog` looks when it last did."""

from __future__ import annotations

import time

_last = (time.monotonic(), "start")


def beat(stage: str | None = None) -> None:
    """Tell that this rank moves; `stage` names what it does from now on."""
    global _last
    _last = (time.monotonic(), stage or _last[1])


def last_beat() -> tuple[float, str]:
    """Seconds since the last beat, and the stage that it was in."""
    when, stage = _last
    return time.monotonic() - when, stage
