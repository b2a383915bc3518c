"""Assign the parts of token trees to micro-batches of similar cost. Every rank computes the same
assignment.

rank           0        1        2
round 0     [A0 B1]    [C0]     [D0 D1]    micro-batches that run at the same time have similar cost
round 1     [E0]       [B0 F0]  []         and each holds at most the budget of distinct tokens
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence, group_by_prompt
from spiral_mega.packing.tree_parts import Branch, TreePart, cut_tree, make_branches

Microbatch = list[TreePart]


def assign_microbatches(
    trees: Sequence[Sequence[Branch]], budget: int, num_replicas: int
) -> list[list[list[SequenceKey]]]:
    """Return keys of sequences as [replica][micro-batch][position]; every replica has as many
    micro-batches.

    No micro-batch exceeds `budget` distinct tokens. Micro-batches that run at the same time have
    similar cost. Trees are cut where they exceed the budget, and into smaller parts where the
    replicas then finish earlier. Without trees there are no micro-batches; with fewer parts than
    replicas, some are empty. Raises ValueError when a sequence alone exceeds the budget.
    """
    longest = max((branch.length for tree in trees for branch in tree), default=0)
    if longest > budget:
        raise ValueError(
            f"a sequence of {longest} tokens exceeds policy.microbatch_tokens ({budget}): raise it"
        )
    sizes = sorted({max(longest, budget // divisor) for divisor in (1, 2, 4, 8)}, reverse=True)
    candidates = [_partition(_cut_all(trees, size), budget, num_replicas) for size in sizes]
    rounds = min(candidates, key=_duration)  # the first of equals, which has the fewest cuts
    return [_keys_of_replica(rounds, replica) for replica in range(num_replicas)]


def split_into_microbatches(
    sequences: list[TrainingSequence], budget: int
) -> list[list[TrainingSequence]]:
    """Split the sequences of one replica into as few micro-batches as fit, by `assign_microbatches`."""
    trees = [make_branches(group) for group in group_by_prompt(sequences)]
    (assignment,) = assign_microbatches(trees, budget, 1)
    return select_assigned(sequences, assignment)


def select_assigned(
    sequences: Sequence[TrainingSequence], assignment: Sequence[Sequence[SequenceKey]]
) -> list[list[TrainingSequence]]:
    """Return the micro-batches that `assignment`, [micro-batch][position], makes of `sequences`."""
    by_key = {sequence.key: sequence for sequence in sequences}
    microbatches = []
    for keys in assignment:
        microbatches.append([by_key[key] for key in keys])
    return microbatches


def _cut_all(trees: Sequence[Sequence[Branch]], size: int) -> list[TreePart]:
    return [part for tree in trees for part in cut_tree(tree, size)]


def _keys_of_replica(rounds: list[list[Microbatch]], replica: int) -> list[list[SequenceKey]]:
    return [_keys(microbatches[replica]) for microbatches in rounds]


def _keys(microbatch: Microbatch) -> list[SequenceKey]:
    return [key for part in microbatch for key in part.keys]


def _cost(microbatch: Microbatch) -> float:
    return sum(part.cost for part in microbatch)


def _duration(rounds: list[list[Microbatch]]) -> float:
    """Sum the cost of the most expensive micro-batch of each round: the replicas wait for one another."""
    return sum(max(map(_cost, microbatches)) for microbatches in rounds)


def _partition(parts: Sequence[TreePart], budget: int, num_replicas: int) -> list[list[Microbatch]]:
    """Partition the parts as [round][replica]: as few rounds as fit, the most expensive micro-batches first."""
    if not parts:
        return []
    rounds = -(-sum(part.tokens for part in parts) // (budget * num_replicas))
    while (bins := _pack_bins(parts, budget, rounds * num_replicas)) is None:
        rounds += 1
    bins.sort(key=lambda microbatch: -_cost(microbatch))
    return [bins[r * num_replicas : (r + 1) * num_replicas] for r in range(rounds)]


def _pack_bins(parts: Sequence[TreePart], budget: int, num_bins: int) -> list[Microbatch] | None:
    """Pack the largest part first, into the cheapest bin that has room; None when a part finds no room."""
    bins: list[Microbatch] = [[] for _ in range(num_bins)]
    room = [budget] * num_bins
    heap = [(0.0, index) for index in range(num_bins)]
    for part in sorted(parts, key=lambda part: (-part.tokens, part.keys)):
        too_full = []
        while heap and room[heap[0][1]] < part.tokens:
            too_full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, index = heapq.heappop(heap)
        bins[index].append(part)
        room[index] -= part.tokens
        heapq.heappush(heap, (cost + part.cost, index))
        for entry in too_full:
            heapq.heappush(heap, entry)
    return bins
