"""Which part of which draw's tree goes to which micro-batch of which rank. Every rank computes the same plan."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch.distributed as dist

from spiral_mega.distributed.collectives import all_to_all_objects, gather_objects
from spiral_mega.packing.training_sequence import TrainingSequence
from spiral_mega.packing.tree import sort_tokens

# Attention's cost beside the linear cost of a token: the token at depth d adds 2 d / ATTENTION_TOKENS.
# At hidden size h a layer's linear work is about 24 h^2 flops a token and attention's 4 h d, so 12 h.
# A constant for h near 4096; the balance is insensitive to it.
ATTENTION_TOKENS = 50_000

Key = tuple[int, int]


class Branch(NamedTuple):
    """A sequence in the order of its draw's tree: its tokens, and how many it shares with the one before it."""

    key: Key
    length: int
    shared: int


class Part(NamedTuple):
    """Sequences that go together: their tree's distinct tokens, and its cost in tokens' linear work."""

    keys: list[Key]
    tokens: int
    cost: float


def cut(branches: Seq[Branch], budget: int) -> list[Part]:
    """Ranges of one tree's branches, each a tree of at most `budget` tokens, with the fewest tokens in all.

    A cut costs the tokens that the branches on both sides of it share, which each side then has for itself. No branch
    may be longer than the budget.
    """
    least = [0.0] + [float("inf")] * len(branches)  # tokens of the first i branches, cut at best
    first = [0] * (len(branches) + 1)  # where the last part of these begins
    for stop in range(1, len(branches) + 1):
        tokens = 0
        for start in range(stop - 1, -1, -1):
            tokens += branches[start].length - (branches[start + 1].shared if start + 1 < stop else 0)
            if tokens > budget:
                break
            if least[start] + tokens < least[stop]:
                least[stop], first[stop] = least[start] + tokens, start
    parts = []
    stop = len(branches)
    while stop:
        parts.append(as_part(branches[first[stop] : stop]))
        stop = first[stop]
    return parts[::-1]


def assign_microbatches(trees: Seq[Seq[Branch]], budget: int, world_size: int) -> list[list[list[Key]]]:
    """Keys of sequences, as [rank][micro-batch][position], every rank with the same number of micro-batches.

    No micro-batch exceeds `budget` distinct tokens. Micro-batches that run at the same time have similar cost. Trees
    are cut where they exceed the budget, and smaller where the ranks then finish earlier. Nothing to plan gives no
    micro-batches; some may be empty when there are fewer parts than ranks. Raises ValueError when a sequence alone
    exceeds the budget.
    """
    longest = max((branch.length for tree in trees for branch in tree), default=0)
    if longest > budget:
        raise ValueError(f"a sequence of {longest} tokens exceeds policy.microbatch_tokens ({budget}): raise it")
    sizes = sorted({max(longest, budget // divisor) for divisor in (1, 2, 4, 8)}, reverse=True)
    plans = [_deal([part for tree in trees for part in cut(tree, size)], budget, world_size) for size in sizes]
    rounds = min(plans, key=_duration)  # the first, the least cut, among equals
    return [[[key for part in members[rank] for key in part.keys] for members in rounds] for rank in range(world_size)]


def distribute(local: list[TrainingSequence], budget: int, replica: int) -> list[list[TrainingSequence]]:
    """Exchange sequences so that each rank holds the micro-batches that the common plan gives its replica.

    `replica`: of the copies of the model, the one that this rank is part of; its ranks all get the same. The result
    depends on the sequences and the number of replicas, not on which rank sampled what. A draw's sequences meet on the
    rank that has its first one, where they are sorted; from there they go where the plan wants them.
    """
    world_size = dist.get_world_size()
    replicas = gather_objects(replica)
    owned = gather_objects([sequence.key for sequence in local])
    home = {draw: rank for (draw, _), rank in sorted((key, r) for r, keys in enumerate(owned) for key in keys)[::-1]}
    gathered = all_to_all_objects([[s for s in local if home[s.key[0]] == rank] for rank in range(world_size)])
    draws = defaultdict(list)
    for sequence in sorted(gathered, key=lambda s: s.key):
        draws[sequence.key[0]].append(sequence)
    trees = [tree for part in gather_objects([branches_of(draw) for draw in draws.values()]) for tree in part]
    plan = assign_microbatches(sorted(trees, key=lambda tree: min(b.key for b in tree)), budget, len(set(replicas)))
    by_key = {sequence.key: sequence for sequence in gathered}
    arrived = all_to_all_objects(
        [[by_key[k] for members in plan[each] for k in members if k in by_key] for each in replicas]
    )
    by_key = {sequence.key: sequence for sequence in arrived}
    return [[by_key[key] for key in members] for members in plan[replica]]


def split(sequences: list[TrainingSequence], budget: int) -> list[list[TrainingSequence]]:
    """One rank's own sequences in as few micro-batches as fit, as `assign_microbatches` puts them together."""
    draws = defaultdict(list)
    for sequence in sequences:
        draws[sequence.key[0]].append(sequence)
    by_key = {sequence.key: sequence for sequence in sequences}
    (plan,) = assign_microbatches([branches_of(draw) for draw in draws.values()], budget, 1)
    return [[by_key[key] for key in members] for members in plan]


def branches_of(draw: list[TrainingSequence]) -> list[Branch]:
    """The sequences of one draw as `cut` and the plan take them."""
    tokens, order, shared = sort_tokens(draw)
    return [Branch(draw[i].key, len(t), s) for t, i, s in zip(tokens, order, shared, strict=True)]


def as_part(branches: Seq[Branch]) -> Part:
    """The tree of consecutive branches, of which the first shares its beginning with none before it."""
    new = [(0 if i == 0 else branch.shared, branch.length) for i, branch in enumerate(branches)]
    tokens = sum(stop - start for start, stop in new)
    pairs = sum(stop * stop - start * start for start, stop in new)
    return Part([branch.key for branch in branches], tokens, tokens + pairs / ATTENTION_TOKENS)


def _deal(parts: Seq[Part], budget: int, world_size: int) -> list[list[list[Part]]]:
    """Parts as [round][rank][position]: as few rounds as fit, the dearest micro-batches together."""
    if not parts:
        return []
    rounds = -(-sum(part.tokens for part in parts) // (budget * world_size))
    while (bins := _pack(parts, budget, rounds * world_size)) is None:
        rounds += 1
    bins.sort(key=lambda members: -sum(part.cost for part in members))
    return [bins[r * world_size : (r + 1) * world_size] for r in range(rounds)]


def _duration(rounds: list[list[list[Part]]]) -> float:
    """Cost of the dearest rank of each round: the ranks wait for one another."""
    return sum(max(sum(part.cost for part in members) for members in ranks) for ranks in rounds)


def _pack(parts: Seq[Part], budget: int, num_bins: int) -> list[list[Part]] | None:
    """The largest first, into the cheapest bin with room; None when some part finds no room."""
    bins: list[list[Part]] = [[] for _ in range(num_bins)]
    room = [budget] * num_bins
    heap = [(0.0, b) for b in range(num_bins)]
    for part in sorted(parts, key=lambda part: (-part.tokens, part.keys)):
        skipped = []
        while heap and room[heap[0][1]] < part.tokens:
            skipped.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, b = heapq.heappop(heap)
        bins[b].append(part)
        room[b] -= part.tokens
        heapq.heappush(heap, (cost + part.cost, b))
        for entry in skipped:
            heapq.heappush(heap, entry)
    return bins
