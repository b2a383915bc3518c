"""Custom: a set objective with the user's own score f(x, G) = `options.score`(problem, traces).

E[update] = M grad E[f] (see algorithm/set_objective.py), provided that f depends on the policy only
through the traces.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from spiral_mega.algorithm.set_objective import SetObjective
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.config.section import Section
from spiral_mega.errors import UserError
from spiral_mega.process.imports import load_function
from spiral_mega.traces import Problem, Trace


class Options(Section):
    """Options of the recipe."""

    score: str = Field(
        description="package.module:function, from a Problem and the Traces of a set to a finite number."
    )


def build(config: AlgorithmConfig, options: Options) -> SetObjective:
    """Build the recipe. Raises ValueError if there is no such function."""
    try:
        function = load_function(options.score, 2)
    except ValueError as error:
        raise ValueError(f"algorithm.options.score is {options.score!r}: {error}") from error

    def score(problem: Problem, traces: Sequence[Trace]) -> float:
        try:
            return float(function(problem, traces))
        except Exception as error:  # a user's function may fail in any way
            raise UserError(
                f"algorithm.options.score: {options.score} failed on a set of problem {problem.id} "
                f"({type(error).__name__}: {error})"
            ) from error

    return SetObjective(config, score)
