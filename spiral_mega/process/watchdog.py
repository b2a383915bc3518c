"""Ending a run that hangs, with the stacks of all ranks, instead of waiting for the job's time to run out.

When no beat (see `heartbeat`) has come on some rank for the time that `run.hang_minutes` gives, that rank
tells the others through the store that they met by; each writes the stacks of its threads to logs/rankN.stacks and ends
with status 1, so that the launcher can start anew from the last checkpoint.
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
SHOWN = 8  # ranks in the report, those first that do not wait for others
LOCKS = (threading.__file__, _base.__file__)  # threads and futures
_ALARM = "spiral_mega/hang"


@contextmanager
def watched(folder: Path, runtime: Runtime, limit_s: float) -> Iterator[None]:
    """End this process, and all other ranks, when the block goes on without a beat for `limit_s` seconds on any.

    SIGUSR2 writes the stacks and lets the run go on.
    """
    path = folder / "logs" / f"rank{runtime.rank}.stacks"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks)
        heartbeat("start")
        watch = _Watch(runtime, limit_s, stacks)
        watch.start()
        try:
            yield
        finally:
            watch.stop()
            faulthandler.unregister(signal.SIGUSR2)
    if not path.stat().st_size:
        path.unlink()


class _Watch(Thread):
    """Looks at this rank's beat and for the others' alarm. It does not log: the hung thread may hold any lock."""

    def __init__(self, runtime: Runtime, limit_s: float, stacks: TextIO) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.runtime, self.limit_s, self.stacks = runtime, limit_s, stacks
        self.interval_s = min(10.0, limit_s / 5)
        self._over = Event()
        # A connection of its own: the main thread may sit in a call on the other. It is the launcher's store, and it
        # works while any rank hangs.
        store: Any = _get_default_store()
        self._store = store.clone()

    def stop(self) -> None:
        self._over.set()
        self.join()
        faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        while not self._over.wait(self.interval_s):
            # What runs without the interpreter when a thread holds that and never gives it back.
            faulthandler.dump_traceback_later(2 * self.limit_s, exit=True, file=self.stacks)
            raised = last_heartbeat()[0] > self.limit_s
            if raised or self._alarmed():
                self._end(raised=raised)

    def _alarmed(self) -> bool:
        try:
            return bool(self._store.check([_ALARM]))
        except (RuntimeError, dist.DistError):  # the launcher is gone; the ranks have been told
            return False

    def _end(self, *, raised: bool) -> None:
        age, stage = last_heartbeat()
        self.stacks.write(f"rank {self.runtime.rank}: no beat for {age:.0f} s, in {stage}\n")
        self.stacks.flush()
        faulthandler.dump_traceback(self.stacks)
        try:
            who = f"rank {self.runtime.rank}, process {os.getpid()} on {socket.gethostname()}"
            place, waits = _where(sys._current_frames()[main_thread().ident or 0])
            first = self._tell({"who": who, "age": age, "stage": stage, "place": place, "waits": waits})
            time.sleep(2 * self.interval_s)  # for all to have seen the alarm: who ends first ends the others' time
            if first:
                self._report()
            time.sleep(self.interval_s)
        finally:
            os._exit(EXIT_STATUS)

    def _tell(self, state: dict[str, Any]) -> bool:
        """Give word to the others; whether this rank is the first to."""
        self._store.set(f"{_ALARM}/{self.runtime.rank}", json.dumps(state))
        me = str(self.runtime.rank)
        return bool(self._store.compare_set(_ALARM, "", me).decode() == me)

    def _report(self) -> None:
        ranks = range(self.runtime.world_size)
        told = {rank: self._store.get(f"{_ALARM}/{rank}") for rank in ranks if self._store.check([f"{_ALARM}/{rank}"])}
        states = [json.loads(text) for text in told.values()]
        states.sort(key=lambda each: (each["waits"], -each["age"]))
        lines = [f"the run hangs: nothing has moved for run.hang_minutes={self.limit_s / 60:g}. Stacks of all ranks: "
                 f"{self.stacks.name.replace(f'rank{self.runtime.rank}.', 'rank*.')}"]  # fmt: skip
        for state in states[:SHOWN]:
            does = "waits for other ranks" if state["waits"] else "does not wait for other ranks"
            lines.append(f"  {state['who']}: {state['age']:.0f} s in {state['stage']!r}, {does}: {state['place']}")
        if len(states) > SHOWN:
            lines.append(f"  and {len(states) - SHOWN} ranks more")
        if silent := [rank for rank in ranks if rank not in told]:
            lines.append(f"  no word from ranks {silent}: stopped, or in a call that holds the interpreter")
        os.write(2, ("\n".join(lines) + "\n").encode())


def _where(frame: FrameType) -> tuple[str, bool]:
    """Where a thread is, as file:line (function), and whether it waits for other ranks there.

    That it sits in a lock says nothing: what counts is who waits for the lock.
    """
    while frame.f_code.co_filename in LOCKS and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_code
    waits = f"{os.sep}torch{os.sep}distributed{os.sep}" in code.co_filename or code.co_filename == collectives.__file__
    return f"{code.co_filename}:{frame.f_lineno} ({code.co_name})", waits
