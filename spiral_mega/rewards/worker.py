"""Code that runs inside a verifier process: confinement (Linux), warm-up, one verification at a time."""

from __future__ import annotations

import math
import numbers
import os
import resource
import signal
from contextlib import suppress
from functools import cache

from spiral_mega.process.signals import set_parent_death_signal
from spiral_mega.rewards.registry import RewardFunction, load_verifier

_DETAIL_CHARS = 500
_WARM_UP = (
    "\\boxed{x^{2}+1}",
    ("(x^{2}+2x)/x",),
)  # fills the LaTeX parser's tables, which it builds on first use


def start(parent_pid: int, verifiers: tuple[str, ...], memory_bytes: int) -> None:
    """Confine this process and load `verifiers`, before the time limit of its first task starts.

    `memory_bytes` limits the address space beyond what the process uses after loading.
    """
    os.setsid()  # signals to the trainer's process group are for the trainer
    signal.signal(
        signal.SIGTERM, signal.SIG_DFL
    )  # pebble's own handler waits for the interpreter, 3 s when that hangs
    _die_with_parent(parent_pid)
    _exit_with_nonzero_status()
    for name in verifiers:
        with suppress(Exception):  # the task itself will raise it again, and report it
            function = _function(name)
            if name == "math":
                function(*_WARM_UP)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_address_space(memory_bytes)


def run(name: str, response: str, answer: tuple[str, ...]) -> tuple[float, str, str]:
    """Verify one response; return (reward, status, detail). Whatever the verifier raises has the status "error"."""
    try:
        reward = _function(name)(response, answer)
        if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
            shown = repr(reward)[:_DETAIL_CHARS]
            return (
                0.0,
                "error",
                f"the verifier {name!r} returned {shown}: it must return a finite number",
            )
        return float(reward), "ok", ""
    except (Exception, SystemExit) as error:
        return 0.0, "error", f"{type(error).__name__}: {error}"[:_DETAIL_CHARS]


@cache
def _function(name: str) -> RewardFunction:
    return load_verifier(name)


def _die_with_parent(parent_pid: int) -> None:
    # A signal from the kernel also ends a process that computes and never reads its pipe.
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before
        os._exit(1)


def _exit_with_nonzero_status() -> None:
    # pebble takes exit status 0 for a clean end, and would wait for the time limit.
    real_exit = os._exit
    os._exit = lambda status: real_exit(status or 1)


def _limit_address_space(more_bytes: int) -> None:
    """Limit the address space to `more_bytes` beyond its current size, and to the hard limit if there is one."""
    with open("/proc/self/statm") as statm:
        current_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    limit = current_bytes + more_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
