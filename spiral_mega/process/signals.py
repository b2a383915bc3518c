"""Helper processes that a stop signal must not end.

Slurm sends a job's signal to every process of a step, helpers included; they are to serve until the ranks have saved.
A process inherits the signals that the thread that starts it blocks, also through exec.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def block_signals() -> None:
    """Block SIGUSR1 in this thread, and so in the threads and processes that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


@contextmanager
def signals_blocked() -> Iterator[None]:
    """As `block_signals`, for the processes that the block starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
