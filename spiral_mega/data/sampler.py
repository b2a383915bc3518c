"""Samples problems without end, one seeded permutation an epoch; resumes exactly where it stopped."""

from __future__ import annotations

import random
from typing import Any

from spiral_mega.errors import DataError
from spiral_mega.seeds import derive_seed


class ProblemSampler:
    """Returns each index in [0, num_problems) once an epoch, in an order seeded by (seed, epoch).

    Its only state is how many indices were drawn. All ranks hold the same sampler, on any world
    size: they draw the same indices, and each takes its slice.

    A call that crosses the end of an epoch continues with the next one and drops nothing. It may
    then return a problem twice, once for each epoch, so seeds must not be derived from the problem
    alone, or both would get the same samples.
    """

    def __init__(self, num_problems: int, seed: int) -> None:
        if num_problems < 1:
            raise DataError(f"num_problems is {num_problems}: a sampler needs at least one problem")
        self.num_problems = num_problems
        self.seed = seed
        self._drawn = 0
        self._order: list[int] = []
        self._order_epoch = -1

    @property
    def drawn(self) -> int:
        """How many problems were drawn since the start."""
        return self._drawn

    @property
    def epoch(self) -> float:
        """Passes over the data so far; 1.5 is half-way through the second."""
        return self._drawn / self.num_problems

    def next(self, count: int) -> list[int]:
        """Return the next `count` indices."""
        if count < 0:
            raise DataError(f"count is {count}: it cannot be negative")
        indices: list[int] = []
        while len(indices) < count:
            epoch, position = divmod(self._drawn, self.num_problems)
            taken = self._permutation(epoch)[position : position + count - len(indices)]
            indices.extend(taken)
            self._drawn += len(taken)
        return indices

    def unread(self, count: int) -> None:
        """Put back the last `count` indices: they are returned next again."""
        if not 0 <= count <= self._drawn:
            raise DataError(f"count is {count}: {self._drawn} were drawn")
        self._drawn -= count

    def state_dict(self) -> dict[str, int]:
        return {"num_problems": self.num_problems, "seed": self.seed, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises DataError if it belongs to other data or another seed."""
        if set(state) != set(self.state_dict()):
            raise DataError(
                f"sampler state has keys {sorted(state)}, not {sorted(self.state_dict())}: wrong "
                "checkpoint"
            )
        if state["num_problems"] != self.num_problems:
            raise DataError(
                f"the checkpoint's sampler ran over {state['num_problems']} problems, this one "
                f"over {self.num_problems}: resume with the same data and filters, or start a new "
                "run"
            )
        if state["seed"] != self.seed:
            raise DataError(
                f"the checkpoint's sampler has seed {state['seed']}, this one {self.seed}: "
                "resume with the same run.seed, or start a new run"
            )
        self._drawn = int(state["drawn"])

    def _permutation(self, epoch: int) -> list[int]:
        if epoch != self._order_epoch:
            order = list(range(self.num_problems))
            random.Random(derive_seed(self.seed, "epoch", epoch)).shuffle(order)
            self._order, self._order_epoch = order, epoch
        return self._order
