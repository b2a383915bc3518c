"""Exchanges of bookkeeping between ranks: small sums, gathered records, records sent to the rank that needs them."""

from __future__ import annotations

import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Each value summed over all ranks, in float64; a key that a rank lacks counts as 0 there."""
    total: dict[str, float] = {}
    for part in gather_objects(values):
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


def max_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """The largest of each value over all ranks."""
    total: dict[str, float] = {}
    for part in gather_objects(values):
        for key, value in part.items():
            total[key] = max(total.get(key, value), value)
    return total


def gather_objects(item: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `item`, in rank order, on every rank."""
    items: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item, group)
    return items  # type: ignore[return-value]


def exchange(outgoing: Sequence[Sequence[T]], group: dist.ProcessGroup | None = None) -> list[T]:
    """Send `outgoing[r]` to rank r; return what came here, ordered by sending rank.

    Only the rank that needs a record receives it, so memory does not grow with the number of ranks.
    """
    payloads = [torch.frombuffer(bytearray(pickle.dumps(list(part))), dtype=torch.uint8) for part in outgoing]
    sent = torch.tensor([payload.numel() for payload in payloads])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    buffer = torch.empty(int(received.sum()), dtype=torch.uint8)
    dist.all_to_all_single(buffer, torch.cat(payloads), received.tolist(), sent.tolist(), group=group)
    parts = torch.split(buffer, received.tolist())
    return [item for part in parts for item in pickle.loads(part.numpy().tobytes())]


class Beside:
    """Does calls one after the other on a thread, for collectives on a group of their own that are waited for later.

    After a call that fails no other is begun: the ranks would no longer be in step. Left by an exception, it leaves the
    thread to itself, for a collective that other ranks never join has no end; otherwise it waits for what is under way.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], partial[Any]] | None] = queue.SimpleQueue()
        self._under_way: deque[Future[Any]] = deque()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Beside:
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
