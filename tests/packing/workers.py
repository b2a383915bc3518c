"""What the ranks do for the tests of packing."""

import random

from spiral_mega.packing.balance import distribute
from spiral_mega.packing.sequences import Sequence
from spiral_mega.runtime import Runtime


def distribute_all(runtime: Runtime, arguments: list[tuple[list[Sequence], int, int]]) -> list[list[list[Sequence]]]:
    """This rank's micro-batches for each of (sequences, budget, seed of ownership); seed 0 gives all to rank 0."""
    results = []
    for sequences, budget, seed in arguments:
        rng = random.Random(seed)
        owners = [rng.randrange(runtime.world_size) if seed else 0 for _ in sequences]
        mine = [sequence for sequence, owner in zip(sequences, owners, strict=True) if owner == runtime.rank]
        rng.shuffle(mine)
        results.append(distribute(mine, budget))
    return results
