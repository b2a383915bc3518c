"""Weights sharded by vocabulary over a process group: O(T) numbers are exchanged, never logits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spiral_mega.kernels.logits import Statistics


def merge(shard: Statistics, group: dist.ProcessGroup) -> Statistics:
    """Of the whole vocabulary, equal on all ranks, from each rank's shard: a maximum and a sum of 2 T numbers each."""
    peaks = torch.stack([shard.max, shard.target])
    dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
    _, total, dot, _ = shard.relative_to(peaks[0])
    sums = torch.stack([total, dot])
    dist.all_reduce(sums, group=group)
    return Statistics(peaks[0], sums[0], sums[1], peaks[1])


def sum_over_group(gradients: list[torch.Tensor | None], group: dist.ProcessGroup) -> None:
    """Each rank saw its own vocabulary only; the gradient of what all ranks share is the sum."""
    for gradient in gradients:
        if gradient is not None:
            dist.all_reduce(gradient, group=group)
