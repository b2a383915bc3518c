"""Measure what the micro-batches of all ranks save, how full they are, and how long ranks wait for one another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.packing.training_sequence import TrainingSequence, group_by_prompt
from spiral_mega.packing.tree_parts import make_branches, make_part


class _Load(NamedTuple):
    """A micro-batch's tokens laid flat, its tokens in trees, and their cost."""

    flat_tokens: int
    tokens: int
    cost: float


def packing_metrics(microbatches: list[list[TrainingSequence]], budget: int) -> dict[str, float]:
    """Return the metrics of an update: `microbatches` on this rank, of at most `budget` tokens
    each; collective.

    - `packing/merge_ratio`: tokens of all sequences laid flat, over those computed.
    - `packing/fill`: tokens computed, over what the micro-batches have room for.
    - `packing/balance`: cost, over the cost if each rank's micro-batch were as expensive as the
      most expensive one that runs at the same time; 1 where no rank waits.

    Empty without micro-batches.
    """
    by_rank = gather_objects([_measure(sequences) for sequences in microbatches])
    rounds = list(zip(*by_rank, strict=True))
    if not rounds:
        return {}
    loads = [load for ranks in rounds for load in ranks]
    tokens = sum(load.tokens for load in loads)
    slowest = sum(map(_highest_cost, rounds))
    return {
        "packing/merge_ratio": sum(load.flat_tokens for load in loads) / tokens,
        "packing/fill": tokens / (len(loads) * budget),
        "packing/balance": sum(load.cost for load in loads) / (len(by_rank) * slowest),
    }


def _highest_cost(loads: Iterable[_Load]) -> float:
    return max(load.cost for load in loads)


def _measure(sequences: list[TrainingSequence]) -> _Load:
    parts = [make_part(make_branches(group)) for group in group_by_prompt(sequences)]
    return _Load(
        flat_tokens=sum(sequence.num_tokens for sequence in sequences),
        tokens=sum(part.tokens for part in parts),
        cost=sum(part.cost for part in parts),
    )
