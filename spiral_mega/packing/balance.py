"""Which micro-batch of which rank a sequence goes to. Every rank computes the same plan from the same lengths."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq

import torch.distributed as dist

from spiral_mega.distributed import exchange, gather_objects
from spiral_mega.packing.sequences import Sequence

# Attention's cost of a sequence of L tokens beside its linear cost L: L * L / ATTENTION_TOKENS.
# At hidden size h a layer's linear work is about 24 h^2 flops a token and attention's 2 h L (causal), so 12 h.
# A constant for h near 4096; the balance is insensitive to it.
ATTENTION_TOKENS = 50_000


def plan_microbatches(lengths: Seq[int], budget: int, world_size: int) -> list[list[list[int]]]:
    """Indices of sequences, as [rank][micro-batch][position], every rank with the same number of micro-batches.

    No micro-batch exceeds `budget` tokens. Micro-batches that run at the same time have similar cost. Empty input
    gives no micro-batches; some may be empty when there are fewer sequences than ranks. Raises ValueError when a
    sequence alone exceeds the budget.
    """
    if not lengths:
        return [[] for _ in range(world_size)]
    if max(lengths) > budget:
        raise ValueError(f"a sequence of {max(lengths)} tokens exceeds policy.microbatch_tokens ({budget}): raise it")
    rounds = -(-sum(lengths) // (budget * world_size))
    while (bins := _pack(lengths, budget, rounds * world_size)) is None:
        rounds += 1
    bins.sort(key=lambda members: -sum(map(_cost, (lengths[i] for i in members))))
    return [[bins[r * world_size + rank] for r in range(rounds)] for rank in range(world_size)]


def distribute(local: list[Sequence], budget: int) -> list[list[Sequence]]:
    """Exchange sequences so that each rank holds the micro-batches that the common plan gives it.

    The result depends on the sequences and the number of ranks, not on which rank sampled what.
    """
    owned = gather_objects([(sequence.key, sequence.num_tokens) for sequence in local])
    ordered = sorted((key, tokens) for part in owned for key, tokens in part)
    plan = plan_microbatches([tokens for _, tokens in ordered], budget, len(owned))
    by_key = {sequence.key: sequence for sequence in local}
    outgoing = [
        [by_key[ordered[i][0]] for members in microbatches for i in members if ordered[i][0] in by_key]
        for microbatches in plan
    ]
    arrived = {sequence.key: sequence for sequence in exchange(outgoing)}
    return [[arrived[ordered[i][0]] for i in members] for members in plan[dist.get_rank()]]


def _cost(length: int) -> float:
    return length + length * length / ATTENTION_TOKENS


def _pack(lengths: Seq[int], budget: int, num_bins: int) -> list[list[int]] | None:
    """Longest first into the cheapest bin with room; None when some sequence finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [budget] * num_bins
    heap = [(0.0, b) for b in range(num_bins)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        skipped = []
        while heap and room[heap[0][1]] < lengths[i]:
            skipped.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, b = heapq.heappop(heap)
        bins[b].append(i)
        room[b] -= lengths[i]
        heapq.heappush(heap, (cost + _cost(lengths[i]), b))
        for entry in skipped:
            heapq.heappush(heap, entry)
    return bins
