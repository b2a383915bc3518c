"""Verifiers of the demo's task that fail on command: while the file FAULT_SWITCH exists."""

from __future__ import annotations

import os
import time
from pathlib import Path

from spiral_mega.rewards.number_path import score


def _on() -> bool:
    return Path(os.environ["FAULT_SWITCH"]).exists()


def slow(response: str, answer: tuple[str, ...]) -> float:
    if _on():
        time.sleep(0.05)
    return score(response, answer)


def dies(response: str, answer: tuple[str, ...]) -> float:
    if _on():
        os._exit(3)
    return score(response, answer)


def overflows(response: str, answer: tuple[str, ...]) -> float:
    """A reward so large that the loss, in float32, is infinite."""
    return score(response, answer) * (1e300 if _on() else 1.0)
