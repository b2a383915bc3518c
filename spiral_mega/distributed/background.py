"""Collectives that run on a thread of their own while the main thread continues."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any


class BackgroundCollectives:
    """Does calls one after the other on a thread, for collectives on a group of their own that are waited for later.

    After a call that fails no other is begun: the ranks would no longer be in step. Left by an exception, it leaves the
    thread to itself, for a collective that other ranks never join has no end; otherwise it waits for what is under way.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], partial[Any]] | None] = queue.SimpleQueue()
        self._under_way: deque[Future[Any]] = deque()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> BackgroundCollectives:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._calls.put(None)
        while kind is None and self._under_way:
            self.wait()
        if kind is None:
            self._thread.join()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> int:
        """Have `function(*arguments)` called; how many calls have not been waited for."""
        self._under_way.append(Future())
        self._calls.put((self._under_way[-1], partial(function, *arguments)))
        return len(self._under_way)

    def wait(self) -> Any:
        """What the first call gave that has not been waited for; raises what it raised, or one before it."""
        return self._under_way.popleft().result()

    def _work(self) -> None:
        failure: BaseException | None = None
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                if failure is not None:
                    raise failure
                future.set_result(function())
            except BaseException as error:
                failure = error
                future.set_exception(error)
