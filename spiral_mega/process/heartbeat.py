"""The heartbeat of this rank: code that makes progress calls `heartbeat`; the watchdog checks when it last did."""

from __future__ import annotations

import time

_last = (time.monotonic(), "start")


def heartbeat(stage: str | None = None) -> None:
    """Record that this rank makes progress; `stage` names the stage that begins now."""
    global _last
    _last = (time.monotonic(), stage or _last[1])


def last_heartbeat() -> tuple[float, str]:
    """Return the seconds since the last heartbeat, and the stage at that time."""
    when, stage = _last
    return time.monotonic() - when, stage
