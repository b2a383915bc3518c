"""Polychromic: search traces learn to be right in different ways (paper, 2.1).

f(x, G) = mean of r(x, y) over y in G, times d(x, G); d = distinct answers (or texts) in G / n.
E[update] = M grad E[f] (see algorithm/set_objective.py). Another diversity is a set objective of
one's own: see custom.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from spiral_mega.algorithm.set_objective import SetObjective, SetScore
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.config.section import Section
from spiral_mega.rewards.agreement import load_answer_of
from spiral_mega.traces import Problem, Trace


class Options(Section):
    """`diversity`: whether traces differ when their answers do, or already when their texts do."""

    diversity: Literal["answers", "texts"] = "answers"


def make_score(options: Options) -> SetScore:
    """Mean reward times diversity. Traces that state no answer count as one answer."""

    def score(problem: Problem, traces: Sequence[Trace]) -> float:
        if options.diversity == "answers":
            distinct = len(
                set(map(load_answer_of(problem.verifier), (trace.answer_text for trace in traces)))
            )
        else:
            distinct = len({trace.text for trace in traces})
        return sum(trace.reward for trace in traces) / len(traces) * distinct / len(traces)

    return score


def build(config: AlgorithmConfig, options: Options) -> SetObjective:
    """The recipe."""
    return SetObjective(config, make_score(options))
