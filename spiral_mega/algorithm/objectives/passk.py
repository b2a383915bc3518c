"""pass@k: search traces learn to contain one right answer in n = k = `set_size` traces.

f(x, G) = max of r(x, y) over y in G; E[update] = M grad E[f] (see algorithm/set_objective.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from spiral_mega.algorithm.objectives import NoOptions
from spiral_mega.algorithm.set_objective import SetObjective
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import Problem, Trace


def score(problem: Problem, traces: Sequence[Trace]) -> float:
    """Return the best reward of the set."""
    return max(trace.reward for trace in traces)


def build(config: AlgorithmConfig, options: NoOptions) -> SetObjective:
    """Build the recipe."""
    return SetObjective(config, score)
