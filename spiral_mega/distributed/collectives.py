"""Collectives for bookkeeping: small sums and maxima, gathered objects, objects sent to the rank that needs them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Sum each value over all ranks, in float64. A key that a rank lacks counts as 0 there."""
    total: dict[str, float] = {}
    for part in gather_objects(values):
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


def max_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Return the largest of each value over all ranks."""
    total: dict[str, float] = {}
    for part in gather_objects(values):
        for key, value in part.items():
            total[key] = max(total.get(key, value), value)
    return total


def gather_objects(item: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's `item`, in rank order, on every rank."""
    items: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item, group)
    return items  # type: ignore[return-value]


def all_to_all_objects(
    outgoing: Sequence[Sequence[T]], group: dist.ProcessGroup | None = None
) -> list[T]:
    """Send the objects `outgoing[r]` to rank r; return the objects received, ordered by sending
    rank.

    Each object goes only to the rank that needs it, so memory does not grow with the number of
    ranks.
    """
    payloads = [
        torch.frombuffer(bytearray(pickle.dumps(list(part))), dtype=torch.uint8)
        for part in outgoing
    ]
    sent = torch.tensor([payload.numel() for payload in payloads])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    buffer = torch.empty(int(received.sum()), dtype=torch.uint8)
    dist.all_to_all_single(
        buffer, torch.cat(payloads), received.tolist(), sent.tolist(), group=group
    )
    parts = torch.split(buffer, received.tolist())
    return [item for part in parts for item in pickle.loads(part.numpy().tobytes())]
