"""End a run that hangs, with the stacks of all ranks, instead of waiting for the job's time limit.

    no heartbeat on some rank for run.hang_minutes
      -> that rank raises the alarm in the store through which the ranks met
      -> every rank writes its threads' stacks to logs/rankN.stacks and its state to the store
      -> the rank that raised it first prints a report, those that do not wait for others first
      -> every rank exits with status 1, so that the launcher can restart from the last checkpoint

The heartbeat is in `process.heartbeat`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import _base
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, main_thread
from types import FrameType
from typing import Any, TextIO

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from spiral_mega.distributed import collectives
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.process.heartbeat import heartbeat, last_heartbeat

EXIT_STATUS = 1
MAX_SHOWN = 8  # ranks in the report
LOCK_FILES = (
    threading.__file__,
    _base.__file__,
)  # where a thread sits that waits for a lock or a future
COLLECTIVE_FOLDERS = (
    f"{os.sep}torch{os.sep}distributed{os.sep}",
    os.path.dirname(collectives.__file__) + os.sep,
)
_ALARM = "spiral_mega/hang"


@contextmanager
def watched(folder: Path, runtime: Runtime, limit_s: float) -> Iterator[None]:
    """End this process and all other ranks when any of them runs `limit_s` seconds in this block
    without a heartbeat.

    SIGUSR2 writes the stacks to the same file and lets the run continue.
    """
    path = folder / "logs" / f"rank{runtime.rank}.stacks"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks)
        heartbeat("start")
        watchdog = _Watchdog(runtime, limit_s, stacks)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.stop()
            faulthandler.unregister(signal.SIGUSR2)
    if not path.stat().st_size:
        path.unlink()


class _Watchdog(Thread):
    """Checks this rank's heartbeat and the alarm of the others. It does not log: the hung thread may hold any lock."""

    def __init__(self, runtime: Runtime, limit_s: float, stacks: TextIO) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.runtime, self.limit_s, self.stacks = runtime, limit_s, stacks
        self.interval_s = min(10.0, limit_s / 5)
        self._stopped = Event()
        # A second connection, since the main thread may block in a call on the first. The store
        # belongs to the launcher, so it answers while any rank hangs.
        store: Any = _get_default_store()
        self._store = store.clone()

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        while not self._stopped.wait(self.interval_s):
            # For a thread that holds the interpreter lock and never returns it: this timer runs
            # without the lock.
            faulthandler.dump_traceback_later(2 * self.limit_s, exit=True, file=self.stacks)
            if last_heartbeat()[0] > self.limit_s or self._alarm_raised():
                self._end()

    def _alarm_raised(self) -> bool:
        try:
            return bool(self._store.check([_ALARM]))
        except (
            RuntimeError,
            dist.DistError,
        ):  # the launcher is gone, and the ranks have had its signal
            return False

    def _end(self) -> None:
        age, stage = last_heartbeat()
        self.stacks.write(f"rank {self.runtime.rank}: no heartbeat for {age:.0f} s, in {stage}\n")
        self.stacks.flush()
        faulthandler.dump_traceback(self.stacks)
        try:
            process = f"rank {self.runtime.rank}, process {os.getpid()} on {socket.gethostname()}"
            position, waits = _position(sys._current_frames()[main_thread().ident or 0])
            state = {
                "process": process,
                "age": age,
                "stage": stage,
                "position": position,
                "waits": waits,
            }
            first = self._raise_alarm(state)
            # The first rank to exit takes the others with it: leave them time to see the alarm.
            time.sleep(2 * self.interval_s)
            if first:
                self._report()
            time.sleep(self.interval_s)
        finally:
            os._exit(EXIT_STATUS)

    def _raise_alarm(self, state: dict[str, Any]) -> bool:
        """Store this rank's state and raise the alarm; return whether this rank is the first to raise it."""
        rank = str(self.runtime.rank)
        self._store.set(f"{_ALARM}/{rank}", json.dumps(state))
        return bool(self._store.compare_set(_ALARM, "", rank).decode() == rank)

    def _report(self) -> None:
        """Print the states of the ranks to standard error."""
        states, silent = self._collect_states()
        states.sort(key=lambda state: (state["waits"], -state["age"]))
        stack_files = self.stacks.name.replace(f"rank{self.runtime.rank}.", "rank*.")
        lines = [
            f"the run hangs: nothing has moved for run.hang_minutes={self.limit_s / 60:g}. Stacks "
            f"of all ranks: {stack_files}"
        ]
        for state in states[:MAX_SHOWN]:
            does = "waits for other ranks" if state["waits"] else "does not wait for other ranks"
            where = f"{state['age']:.0f} s in {state['stage']!r}"
            lines.append(f"  {state['process']}: {where}, {does}: {state['position']}")
        if len(states) > MAX_SHOWN:
            lines.append(f"  and {len(states) - MAX_SHOWN} ranks more")
        if silent:
            lines.append(
                f"  no state from ranks {silent}: stopped, or in a call that holds the interpreter"
            )
        os.write(2, ("\n".join(lines) + "\n").encode())

    def _collect_states(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the states that ranks have stored, and the ranks that have stored none."""
        states, silent = [], []
        for rank in range(self.runtime.world_size):
            key = f"{_ALARM}/{rank}"
            if self._store.check([key]):
                states.append(json.loads(self._store.get(key)))
            else:
                silent.append(rank)
        return states, silent


def _position(frame: FrameType) -> tuple[str, bool]:
    """Return where a thread is, as file:line (function), and whether it waits for other ranks
    there.

    Frames inside locks and futures are skipped: what counts is the code that waits for them.
    """
    while frame.f_code.co_filename in LOCK_FILES and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_code
    waits = any(folder in code.co_filename for folder in COLLECTIVE_FOLDERS)
    return f"{code.co_filename}:{frame.f_lineno} ({code.co_name})", waits
