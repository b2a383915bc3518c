"""Requests to stop: on SIGTERM, SIGINT or SIGUSR1 a run saves a checkpoint and ends at the next safe point."""

from __future__ import annotations

import logging
import os
import signal
import time
from types import FrameType

from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.process.signals import set_parent_death_signal

log = logging.getLogger(__name__)

REPEAT_S = (
    5.0  # torchrun repeats the terminal's Ctrl-C at once; a second one by a person comes later
)


def stop_when_launcher_dies() -> None:
    """Send this rank SIGTERM when the torchrun that started it dies, even of SIGKILL.

    Otherwise the ranks would keep training unseen, and keep their devices and run.dir.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        set_parent_death_signal(signal.SIGTERM)


class StopRequest:
    """Set by the first signal. A second SIGINT some seconds later ends the process at once, as SIGKILL always does."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: str | None = None
        self._time = 0.0
        self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}

    def __call__(self) -> bool:
        """Return whether this rank was asked to stop."""
        return self.received is not None

    def on_any_rank(self) -> bool:
        """Return whether any rank was asked to stop, the same answer on all ranks; collective."""
        return any(gather_objects(self()))

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._time = signal.Signals(number).name, time.monotonic()
            log.warning(
                "%s: saving a checkpoint and stopping at the next safe point", self.received
            )
        elif number == signal.SIGINT and time.monotonic() - self._time > REPEAT_S:
            raise KeyboardInterrupt
