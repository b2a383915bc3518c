"""When to give up on a policy whose gradients are not finite."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spiral_mega.errors import UserError

SKIPPED, UPDATES = "optim/skipped", "optim/updates"


class GradientError(UserError):
    """Too many updates in a row had no finite gradient."""


@dataclass
class SkippedUpdates:
    """Counts a model's updates that were skipped in a row, and allows `limit` of them."""

    limit: int
    in_a_row: Counter[str] = field(default_factory=Counter)

    def check(self, metrics: dict[str, float]) -> None:
        """Take a step's metrics. Raises GradientError past the limit; a step without any update changes nothing."""
        for model in [name.removeprefix(UPDATES) for name in metrics if name.startswith(UPDATES)]:
            skipped = int(metrics.get(SKIPPED + model, 0.0))
            self.in_a_row[model] = skipped + (self.in_a_row[model] if skipped == metrics[UPDATES + model] else 0)
            if self.in_a_row[model] > self.limit:
                raise GradientError(
                    f"the gradient was not finite in the last {self.in_a_row[model]} updates{_of(model)}, which were "
                    f"skipped; policy.max_skipped_updates allows {self.limit}: look for overflow (policy.param_dtype, "
                    "rewards, optimizer.lr). The weights are those before; the run goes on from its last checkpoint"
                )


def _of(model: str) -> str:
    return f" of {model.removeprefix('/')}" if model else ""
