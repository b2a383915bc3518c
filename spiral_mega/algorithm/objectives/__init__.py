"""Objectives: what is sampled for a problem, and who gets which credit. One recipe a file of this folder.

A new recipe is a new file with a `build(config, options) -> Objective`; its name in the configuration is the file's. If
it has options of its own, it also has an `Options` (a config Section), which `algorithm.options` is read by.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

from spiral_mega.algorithm.plan import Plan
from spiral_mega.config.explain import read_section
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.config.section import Section
from spiral_mega.traces import Episode


class Objective(Protocol):
    """A recipe. Everything after it (packing, loss, optimizer) sees traces with advantages, never sets."""

    @property
    def components(self) -> tuple[str, ...]:
        """The components that it trains; what loss weights and reductions apply to. Other traces are left alone."""

    @property
    def plan(self) -> Plan:
        """What is sampled for a problem."""

    def assign(self, episode: Episode) -> None:
        """Fill `advantage` (after the length gate) and `gated` of every trace from the traces' rewards."""

    def gradient_scales(self) -> dict[str, float]:
        """The factor s of each component: E[sum of A grad log pi] = s * (its part of the gradient), per problem.

        Without the length gate. Raises ValueError if there is no such factor.
        """


class NoOptions(Section):
    """Of a recipe that has none."""


def make_objective(config: AlgorithmConfig) -> Objective:
    """The objective that `config.objective` names, with `config.options`.

    Raises ValueError for an unknown name, with the known ones, and for options that are not the recipe's.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if config.objective not in known:
        raise ValueError(f"algorithm.objective is {config.objective!r}: use one of {', '.join(known)}")
    recipe = importlib.import_module(f"{__name__}.{config.objective}")
    options = read_section(getattr(recipe, "Options", NoOptions), config.options, "algorithm.options")
    return cast(Objective, recipe.build(config, options))
