"""Signals of helper processes and threads: which to block, and what to get when the parent dies (Linux)."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


def block_signals() -> None:
    """Block SIGUSR1 in this thread, and so in the threads and processes that it starts.

    Slurm sends a job's SIGUSR1 to every process of a step, helpers included, but helpers have to
    serve until the ranks have saved. A process inherits the blocked signals of the thread that
    starts it, also through exec.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the same signals in the processes that are started in this block."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send this process signal `number` when its parent dies, even of SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
