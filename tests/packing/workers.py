"""What the ranks do for the tests of packing."""

import random

from spiral_mega.distributed.runtime import Runtime
from spiral_mega.packing.balance import distribute
from spiral_mega.packing.packing_metrics import packing_metrics
from spiral_mega.packing.training_sequence import TrainingSequence


def distribute_all(
    runtime: Runtime, arguments: list[tuple[list[TrainingSequence], int, int, int]]
) -> list[list[list[TrainingSequence]]]:
    """This rank's micro-batches for each of (sequences, budget, seed of ownership, ranks of a replica); seed 0 gives
    all to rank 0."""
    results = []
    for sequences, budget, seed, ranks in arguments:
        rng = random.Random(seed)
        owners = [rng.randrange(runtime.world_size) if seed else 0 for _ in sequences]
        mine = [sequence for sequence, owner in zip(sequences, owners, strict=True) if owner == runtime.rank]
        rng.shuffle(mine)
        results.append(distribute(mine, budget, runtime.rank // ranks))
    return results


def measure(
    runtime: Runtime, arguments: tuple[list[list[list[list[TrainingSequence]]]], int]
) -> list[dict[str, float]]:
    """Metrics of each case, [rank][micro-batch] of sequences, at a budget."""
    cases, budget = arguments
    return [packing_metrics(case[runtime.rank], budget) for case in cases]
