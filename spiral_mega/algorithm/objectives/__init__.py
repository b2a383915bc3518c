"""Objectives (recipes): what is sampled for a problem, and how credit is assigned. One file each.

To add a recipe, add a file with `build(config, options) -> Objective`; `algorithm.objective` is the
name of the file. For options of its own, define a config Section `Options` in it, as which
`algorithm.options` is then read.
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
    """A recipe. What follows (packing, loss, optimizer) sees traces with advantages, and no sets."""

    @property
    def components(self) -> tuple[str, ...]:
        """The components to train, to which loss weights and reductions apply; no others are trained."""

    @property
    def plan(self) -> SamplingPlan:
        """What to sample for a problem."""

    def assign_credit(self, episode: Episode) -> None:
        """Set `advantage` (after the length gate) and `gated` of every trace from the rewards."""

    def gradient_scales(self) -> dict[str, float]:
        """Return the scale s of each component's gradient, without the length gate.

        E[sum of A grad log pi] = s * (the component's part of grad J), for each problem. Raises
        ValueError if there is no such factor.
        """


class NoOptions(Section):
    """For a recipe without options."""


class FreezeComponent:
    """An objective with one of two models frozen: it samples, and its traces get no credit.

    Paper, appendix B.
    """

    def __init__(self, objective: Objective, frozen: str) -> None:
        """`frozen`: the name of the frozen model, search or aggregation."""
        self.plan, self._objective = objective.plan, objective
        self.components = tuple(
            name for name in objective.components if (name == SEARCH) != (frozen == SEARCH)
        )

    def assign_credit(self, episode: Episode) -> None:
        """Assign credit as the objective does, then remove that of the frozen model's traces."""
        self._objective.assign_credit(episode)
        for trace in episode.traces():
            if trace.component not in self.components:
                trace.advantage, trace.gated = 0.0, False

    def gradient_scales(self) -> dict[str, float]:
        """Return the scales of the components that are trained; freezing does not change them.

        Each is the scale of a gradient at fixed weights of the other model.
        """
        scales = self._objective.gradient_scales()
        return {name: scale for name, scale in scales.items() if name in self.components}


def make_objective(config: AlgorithmConfig, frozen: str | None = None) -> Objective:
    """Return the objective that `config.objective` names, with `config.options`.

    `frozen` names the one of two models that is not trained. Raises ValueError for an unknown
    objective, listing the known ones, and for options that are not the recipe's.
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
    return objective if frozen is None else FreezeComponent(objective, frozen)
