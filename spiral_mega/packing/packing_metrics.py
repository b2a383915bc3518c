"""How much the micro-batches of all ranks spare, hold, and wait for one another."""

from __future__ import annotations

from collections import defaultdict

from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.packing.balance import as_part, branches_of
from spiral_mega.packing.training_sequence import TrainingSequence


def packing_metrics(microbatches: list[list[TrainingSequence]], budget: int) -> dict[str, float]:
    """Of an update's micro-batches, `microbatches` on this rank, at most `budget` tokens each; collective.

    `merge_ratio`: tokens of all sequences laid flat, over those computed. `fill`: tokens computed, over what the
    micro-batches have room for. `balance`: cost, over that if every rank's micro-batch cost what the dearest does that
    runs at the same time; 1 where no rank waits. Empty for nothing.
    """
    by_rank = gather_objects([_measure(sequences) for sequences in microbatches])
    rounds = list(zip(*by_rank, strict=True))
    if not rounds:
        return {}
    flat, tokens, cost = (sum(one[i] for ranks in rounds for one in ranks) for i in range(3))
    slots = len(rounds) * len(by_rank)
    return {
        "packing/merge_ratio": flat / tokens,
        "packing/fill": tokens / (slots * budget),
        "packing/balance": cost / (len(by_rank) * sum(max(one[2] for one in ranks) for ranks in rounds)),
    }


def _measure(sequences: list[TrainingSequence]) -> tuple[int, int, float]:
    """Tokens laid flat, tokens in trees, and their cost."""
    draws = defaultdict(list)
    for sequence in sequences:
        draws[sequence.key[0]].append(sequence)
    parts = [as_part(branches_of(draw)) for draw in draws.values()]
    return sum(s.num_tokens for s in sequences), sum(p.tokens for p in parts), sum(p.cost for p in parts)
