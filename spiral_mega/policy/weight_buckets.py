"""Group weights into buckets that are gathered together, so that streaming a model takes bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def make_buckets(
    tensors: Iterable[T], num_bytes: Callable[[T], int], bucket_bytes: int
) -> Iterator[list[T]]:
    """Yield `tensors` in order, in groups of at most `bucket_bytes`; a tensor larger than that is a group alone."""
    bucket: list[T] = []
    filled = 0
    for tensor in tensors:
        size = num_bytes(tensor)
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += size
    if bucket:
        yield bucket
