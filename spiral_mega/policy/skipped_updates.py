"""Stop a run whose gradients stay not finite."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spiral_mega.errors import UserError

SKIPPED, UPDATES = "optim/skipped", "optim/updates"


class GradientError(UserError):
    """Too many updates in a row had no finite gradient."""


@dataclass
class SkippedUpdates:
    """Counts each model's consecutive skipped updates, and allows `limit` of them."""

    limit: int
    consecutive: Counter[str] = field(default_factory=Counter)

    def check(self, metrics: dict[str, float]) -> None:
        """Count a step's skipped updates; a step without updates changes nothing.

        Raises GradientError past the limit.
        """
        for model in [name.removeprefix(UPDATES) for name in metrics if name.startswith(UPDATES)]:
            skipped = int(metrics.get(SKIPPED + model, 0.0))
            if skipped == metrics[UPDATES + model]:
                self.consecutive[model] += skipped
            else:
                self.consecutive[model] = skipped
            if self.consecutive[model] > self.limit:
                of_model = f" of {model.removeprefix('/')}" if model else ""
                raise GradientError(
                    f"the gradient was not finite in the last {self.consecutive[model]} "
                    f"updates{of_model}, which were skipped; policy.max_skipped_updates allows "
                    f"{self.limit}: look for overflow (policy.param_dtype, rewards, optimizer.lr). "
                    "The weights are those before; the run resumes from its last checkpoint"
                )
