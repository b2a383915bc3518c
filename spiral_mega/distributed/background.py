"""Collectives on a background thread, while the main thread continues."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any


class BackgroundCollectives:
    """Runs collectives in order on a background thread and a dedicated process group; collect
    results with `wait`.

        with BackgroundCollectives() as background:
            background.submit(all_to_all_objects, outgoing, group)
            ...                                   # work on
            received = background.wait()

    After a call fails, no later call is started: the ranks would no longer be in step. Leaving the
    block normally waits for all calls. Leaving it by an exception abandons the thread, since a
    collective that other ranks never join does not return.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], partial[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._pending: deque[Future[Any]] = deque()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> BackgroundCollectives:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._calls.put(None)
        while kind is None and self._pending:
            self.wait()
        if kind is None:
            self._thread.join()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> int:
        """Queue `function(*arguments)`; return the number of calls whose result has not been collected."""
        future: Future[Any] = Future()
        self._pending.append(future)
        self._calls.put((future, partial(function, *arguments)))
        return len(self._pending)

    def wait(self) -> Any:
        """Return the result of the oldest uncollected call. Raises what that call, or one before it, raised."""
        return self._pending.popleft().result()

    def _run(self) -> None:
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
