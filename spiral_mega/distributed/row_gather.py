"""Assemble whole tensors from row shards, without an intermediate copy.

    wholes = gatherer.empty(specs, device)
    ...                                   # each rank writes its own rows into them
    gatherer.complete(wholes)             # collective; every rank now has all rows

Rows are sharded as FSDP2 shards them: ceil(rows / world size) on each rank, fewer or none on the
last ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def local_shard(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return the rows of `tensor` that `rank` holds: a view, possibly empty."""
    size = -(-len(tensor) // world_size)
    return tensor[rank * size : (rank + 1) * size]


class RowGatherer:
    """Gathers row-sharded tensors within `group`.

    Each rank's rows are broadcast straight into their place: an all-gather on CPU would copy
    everything twice more.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def empty(self, specs: Sequence[TensorSpec], device: torch.device) -> list[torch.Tensor]:
        """Allocate tensors of these shapes and dtypes."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]

    def complete(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill in the rows of the other ranks, after each rank has written its own; collective."""
        works = []
        for tensor in tensors:
            for source in range(self.group.size()):
                shard = local_shard(tensor, source, self.group.size())
                if shard.numel():
                    works.append(
                        dist.broadcast(shard, group=self.group, group_src=source, async_op=True)
                    )
        for work in works:
            work.wait()
