"""Objectives: what is sampled for a problem, and who gets which credit. One recipe a file of this folder.

A new recipe is a new file with a `build(config) -> Objective`; its name in the configuration is the file's.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import Episode


class Objective(Protocol):
    """A recipe. Everything after it (packing, loss, optimizer) sees traces with advantages, never sets."""

    @property
    def components(self) -> tuple[str, ...]:
        """The components of the traces it samples; what loss weights and reductions apply to."""

    @property
    def aggregates(self) -> bool:
        """Whether sets and aggregation traces are sampled, after the search traces."""

    def assign(self, episode: Episode) -> None:
        """Fill `advantage` (after the length gate) and `gated` of every trace from the traces' rewards."""

    def gradient_scales(self) -> dict[str, float]:
        """The factor s of each component: E[sum of A grad log pi] = s * (its part of the gradient), per problem.

        Without the length gate. Raises ValueError if there is no such factor.
        """


def make_objective(config: AlgorithmConfig) -> Objective:
    """The objective that `config.objective` names. Raises ValueError for an unknown name, with the known ones."""
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if config.objective not in known:
        raise ValueError(f"algorithm.objective is {config.objective!r}: use one of {', '.join(known)}")
    recipe = importlib.import_module(f"{__name__}.{config.objective}")
    return cast(Objective, recipe.build(config))
