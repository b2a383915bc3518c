"""Functions that the ranks run for the tests of packing."""

import random

from spiral_mega.distributed.runtime import Runtime
from spiral_mega.packing.distribute import distribute
from spiral_mega.packing.packing_metrics import packing_metrics
from spiral_mega.packing.training_sequence import TrainingSequence


def distribute_all(
    runtime: Runtime, arguments: list[tuple[list[TrainingSequence], int, int, int]]
) -> list[list[list[TrainingSequence]]]:
    """Return this rank's micro-batches for each of (sequences, budget, seed, ranks of a replica).

    The seed decides which rank holds which sequence at first; with 0 rank 0 holds all.
    """
    results = []
    for sequences, budget, seed, ranks in arguments:
        rng = random.Random(seed)
        holders = [rng.randrange(runtime.world_size) if seed else 0 for _ in sequences]
        mine = [
            sequence
            for sequence, holder in zip(sequences, holders, strict=True)
            if holder == runtime.rank
        ]
        rng.shuffle(mine)
        results.append(distribute(mine, budget, runtime.rank // ranks))
    return results


def measure(
    runtime: Runtime, arguments: tuple[list[list[list[list[TrainingSequence]]]], int]
) -> list[dict[str, float]]:
    """Return the metrics of each case, [rank][micro-batch] of sequences, at a budget."""
    cases, budget = arguments
    return [packing_metrics(case[runtime.rank], budget) for case in cases]
