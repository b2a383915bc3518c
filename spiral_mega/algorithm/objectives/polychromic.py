"""Polychromic: search traces learn to be right in different ways (paper, 2.1).

f(x, G) = mean of r(x, y) over y in G, times d(x, G), where d is the number of distinct answers (or
texts) in G, divided by n. E[update] = M grad E[f] (see algorithm/set_objective.py). For another
measure of diversity use custom.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from spiral_mega.algorithm.set_objective import SetObjective, SetScore
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.config.section import Section
from spiral_mega.rewards.agreement import load_answer_of
from spiral_mega.traces import Problem, Trace


class Options(Section):
    """Options of the recipe."""

    diversity: Literal["answers", "texts"] = Field(
        default="answers",
        description="Count traces as different if their answers, or their texts, differ.",
    )


def make_score(options: Options) -> SetScore:
    """Return mean reward times diversity; all traces without an answer count as one answer."""

    def score(problem: Problem, traces: Sequence[Trace]) -> float:
        if options.diversity == "answers":
            answer_of = load_answer_of(problem.verifier)
            distinct = len({answer_of(trace.answer_text) for trace in traces})
        else:
            distinct = len({trace.text for trace in traces})
        return sum(trace.reward for trace in traces) / len(traces) * distinct / len(traces)

    return score


def build(config: AlgorithmConfig, options: Options) -> SetObjective:
    """Build the recipe."""
    return SetObjective(config, make_score(options))
