"""Objectives: what is sampled for a problem, and who gets which credit. One recipe a file of this
folder.

A new recipe is a new file with a `build(config, options) -> Objective`; its name in the
configuration is the file's. If it has options of its own, it also has an `Options` (a config
Section), which `algorithm.options` is read by.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.config.section import Section, read_section
from spiral_mega.traces import SEARCH, Episode


class Objective(Protocol):
    """A recipe. Everything after it (packing, loss, optimizer) sees traces with advantages, never sets."""

    @property
    def components(self) -> tuple[str, ...]:
        """The components that it trains; what loss weights and reductions apply to. Other traces are left alone."""

    @property
    def plan(self) -> SamplingPlan:
        """What is sampled for a problem."""

    def assign_credit(self, episode: Episode) -> None:
        """Fill `advantage` (after the length gate) and `gated` of every trace from the traces' rewards."""

    def gradient_scales(self) -> dict[str, float]:
        """The factor s of each component: E[sum of A grad log pi] = s * (its part of the gradient),
        per problem.

        Without the length gate. Raises ValueError if there is no such factor.
        """


class NoOptions(Section):
    """Of a recipe that has none."""


class FreezeComponent:
    """An objective with one of two models held: its traces are sampled, and get no credit (paper, appendix B)."""

    def __init__(self, objective: Objective, held: str) -> None:
        """`held`: search or aggregation."""
        self.plan, self._objective = objective.plan, objective
        self.components = tuple(
            name for name in objective.components if (name == SEARCH) != (held == SEARCH)
        )

    def assign_credit(self, episode: Episode) -> None:
        """As the objective does; then nothing is left to those that are held."""
        self._objective.assign_credit(episode)
        for trace in episode.traces():
            if trace.component not in self.components:
                trace.advantage, trace.gated = 0.0, False

    def gradient_scales(self) -> dict[str, float]:
        """Those of the others, which do not change: each is a gradient with the other model's weights held."""
        return {
            name: each
            for name, each in self._objective.gradient_scales().items()
            if name in self.components
        }


def make_objective(config: AlgorithmConfig, held: str | None = None) -> Objective:
    """The objective that `config.objective` names, with `config.options`; of two models, `held`
    learns nothing.

    Raises ValueError for an unknown name, with the known ones, and for options that are not the
    recipe's.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if config.objective not in known:
        raise ValueError(
            f"algorithm.objective is {config.objective!r}: use one of {', '.join(known)}"
        )
    recipe = importlib.import_module(f"{__name__}.{config.objective}")
    options = read_section(
        getattr(recipe, "Options", NoOptions), config.options, "algorithm.options"
    )
    objective = cast(Objective, recipe.build(config, options))
    return objective if held is None else FreezeComponent(objective, held)
