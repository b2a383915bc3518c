"""Asking a run to stop: SIGTERM, SIGINT and SIGUSR1 let it save and leave at the next safe point."""

from __future__ import annotations

import logging
import signal
from types import FrameType

from spiral_mega.distributed import gather_objects

log = logging.getLogger(__name__)


class StopRequest:
    """Set by the first signal. A second SIGINT or SIGTERM ends the process in the ordinary way, at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous = {int(number): signal.signal(number, self._handle) for number in self.SIGNALS}

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
        self.received = signal.Signals(number).name
        log.warning("%s: saving a checkpoint and stopping at the next safe point", self.received)
        if number != signal.SIGUSR1:
            signal.signal(number, self._previous[number] or signal.SIG_DFL)
