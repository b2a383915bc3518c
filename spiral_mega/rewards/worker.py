"""What runs inside a verifier process: confinement (Linux), warm-up, one verification."""

from __future__ import annotations

import ctypes
import math
import numbers
import os
import resource
import signal
from contextlib import suppress
from functools import cache

from spiral_mega.rewards.registry import RewardFunction, load_verifier

_PR_SET_PDEATHSIG = 1
_DETAIL_CHARS = 500
_WARM_UP = ("\\boxed{x^{2}+1}", ("(x^{2}+2x)/x",))  # fills the LaTeX parser's tables, which it builds on first use


def start(parent_pid: int, kinds: tuple[str, ...], memory_bytes: int) -> None:
    """Confine this process and load `kinds`, before the clock of its first task starts.

    `memory_bytes` is address space beyond what the process holds once the kinds are loaded.
    """
    os.setsid()  # a signal to the trainer's process group is the trainer's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's own handler waits for the interpreter, 3 s when that hangs
    _die_with_parent(parent_pid)
    _exit_visibly()
    for kind in kinds:
        with suppress(Exception):  # the task itself will meet it, and report it
            function = _function(kind)
            if kind == "math":
                function(*_WARM_UP)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _address_space_bytes() + memory_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run(kind: str, response: str, answer: tuple[str, ...]) -> tuple[float, str, str]:
    """(reward, status, detail) of one response; whatever the kind's function raises is the status "error"."""
    try:
        reward = _function(kind)(response, answer)
        if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
            shown = repr(reward)[:_DETAIL_CHARS]
            return 0.0, "error", f"the kind {kind!r} returned {shown}: it must return a finite number"
        return float(reward), "ok", ""
    except (Exception, SystemExit) as error:
        return 0.0, "error", f"{type(error).__name__}: {error}"[:_DETAIL_CHARS]


@cache
def _function(kind: str) -> RewardFunction:
    return load_verifier(kind)


def _die_with_parent(parent_pid: int) -> None:
    # The kernel's signal reaches a process that computes and never looks at its pipe.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _exit_visibly() -> None:
    # pebble takes exit code 0 for a clean end and would wait for the time limit.
    real_exit = os._exit
    os._exit = lambda status: real_exit(status or 1)


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
