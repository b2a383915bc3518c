"""Signs of life of this rank: whatever works calls `heartbeat`, and `watchdog` looks when it last did."""

from __future__ import annotations

import time

_last = (time.monotonic(), "start")


def heartbeat(stage: str | None = None) -> None:
    """Tell that this rank moves; `stage` names what it does from now on."""
    global _last
    _last = (time.monotonic(), stage or _last[1])


def last_heartbeat() -> tuple[float, str]:
    """Seconds since the last heartbeat, and the stage that it was in."""
    when, stage = _last
    return time.monotonic() - when, stage
