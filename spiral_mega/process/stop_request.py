"""Asking a run to stop: SIGTERM, SIGINT and SIGUSR1 let it save and leave at the next safe point."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from types import FrameType

from spiral_mega.distributed.collectives import gather_objects

log = logging.getLogger(__name__)

REPEAT_S = 5.0  # torchrun passes on the Ctrl-C that the terminal already sent; a person's second one comes later


_PR_SET_PDEATHSIG = 1


def set_parent_death_signal() -> None:
    """Have the kernel send this rank SIGTERM when the torchrun that started it dies, also of SIGKILL.

    Nobody else would: the ranks would train on, unseen, and hold their devices and run.dir.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class StopRequest:
    """Set by the first signal. A second SIGINT after a while ends the process at once, as SIGKILL always does."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: str | None = None
        self._when = 0.0
        self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}

    def __call__(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.received is not None

    def on_any_rank(self) -> bool:
        """Whether any rank was asked to stop, the same answer on all; collective."""
        return any(gather_objects(self()))

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._when = signal.Signals(number).name, time.monotonic()
            log.warning("%s: saving a checkpoint and stopping at the next safe point", self.received)
        elif number == signal.SIGINT and time.monotonic() - self._when > REPEAT_S:
            raise KeyboardInterrupt
