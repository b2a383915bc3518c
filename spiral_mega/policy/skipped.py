"""When to give up on a policy whose gradients are not finite."""

from __future__ import annotations

from dataclasses import dataclass

from spiral_mega.errors import UserError


class GradientError(UserError):
    """Too many updates in a row had no finite gradient."""


@dataclass
class SkippedUpdates:
    """Counts updates that were skipped in a row, and allows `limit` of them."""

    limit: int
    in_a_row: int = 0

    def check(self, metrics: dict[str, float]) -> None:
        """Take a step's metrics. Raises GradientError past the limit; a step without any update changes nothing."""
        skipped = int(metrics.get("optim/skipped", 0.0))
        self.in_a_row = skipped + (self.in_a_row if skipped == metrics["optim/updates"] else 0)
        if self.in_a_row > self.limit:
            raise GradientError(
                f"the gradient was not finite in the last {self.in_a_row} updates, which were skipped; "
                f"policy.max_skipped allows {self.limit}: look for overflow (policy.param_dtype, rewards, "
                "optimizer.lr). The weights are those before; the run goes on from its last checkpoint"
            )
