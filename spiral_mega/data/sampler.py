"""Which problem comes next: an endless walk over seeded permutations that resumes exactly where it stopped."""

from __future__ import annotations

import random
from typing import Any

from spiral_mega.errors import DataError
from spiral_mega.seeds import derive_seed


class ProblemSampler:
    """Indices in [0, num_problems), each once an epoch, in an order that depends on (seed, epoch) alone.

    The only state is how many were drawn, so it is the same on every rank of every world size: all ranks hold the
    same sampler, draw the same indices, and each takes its slice.

    A call may cross the end of an epoch: it goes on with the next one and drops nothing. At such a seam one call can
    hold a problem twice, once for each epoch. So what is derived for a draw (a sampling seed, say) should depend on
    its number, `drawn`, and not on the problem alone, or the two would get the same samples.
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
        """Problems drawn since the start; the number of the next draw."""
        return self._drawn

    @property
    def epoch(self) -> float:
        """Passes over the data so far; 1.5 is half-way through the second."""
        return self._drawn / self.num_problems

    def next(self, count: int) -> list[int]:
        """The next `count` indices."""
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
        """Undo the last `count` draws: they come next again."""
        if not 0 <= count <= self._drawn:
            raise DataError(f"count is {count}: {self._drawn} were drawn")
        self._drawn -= count

    def state_dict(self) -> dict[str, int]:
        return {"num_problems": self.num_problems, "seed": self.seed, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken. Raises DataError when it is of other data or of another seed."""
        if set(state) != set(self.state_dict()):
            raise DataError(
                f"sampler state has keys {sorted(state)}, not {sorted(self.state_dict())}: wrong checkpoint"
            )
        if state["num_problems"] != self.num_problems:
            raise DataError(
                f"the checkpoint's sampler ran over {state['num_problems']} problems, this one over "
                f"{self.num_problems}: resume with the same data and filters, or start a new run"
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
