"""What the harnesses are told of a problem's episode, and what they give back. Small: no text, no tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.rewards.agreement import Groups
from spiral_mega.traces import Episode

KINDS_OF_TOKENS = ("prompt", "generated", "cached")


@dataclass(frozen=True, slots=True)
class GradedEpisode:
    """Facts on the traces of one episode, each a list in the order of `Episode.traces()`.

    `groups` names their answers (see rewards.agreement). `tokens` holds, by kind, the tokens of each: its prompt's,
    those generated, and those of the prompt that the engine had cached. `cut` holds for each budget, as text, the
    rewards of the search traces if they had been cut after so many tokens. `facts` are the analysis's.
    """

    problem: str
    rewards: list[float]
    groups: Groups
    tokens: dict[str, list[int]]
    cut: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, episode: Episode, groups: Groups, cut: dict[str, list[float]], facts: dict[str, Any]) -> GradedEpisode:
        traces = episode.traces()
        tokens = {
            "prompt": [len(trace.prompt_ids) for trace in traces],
            "generated": [trace.length for trace in traces],
            "cached": [trace.cached_tokens for trace in traces],
        }
        return cls(episode.problem.id, [trace.reward for trace in traces], groups, tokens, cut, facts)

    def row(self) -> dict[str, Any]:
        """As JSON, from which `GradedEpisode(**row)` is made again."""
        return asdict(self)

    def spent(self, positions: Iterable[int]) -> dict[str, float]:
        """Tokens of the traces at these positions, by kind."""
        chosen = list(positions)
        return {kind: float(sum(self.tokens[kind][i] for i in chosen)) for kind in KINDS_OF_TOKENS}


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a harness: a mean over problems, of `values` (one a problem, in their order).

    It was reached with `x` of `axis` ("k" responses, aggregation "step", "budget" of a response), with `parallel`
    responses at a time, by spending `tokens` a problem, of each kind, on average; `budget` is what could at most have
    been generated.
    """

    harness: str
    metric: str
    axis: str
    x: int
    parallel: int
    values: list[float]
    tokens: dict[str, float]
    budget: int

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)


def mean_tokens(spent: Sequence[dict[str, float]], times: float = 1.0) -> dict[str, float]:
    """The mean over problems of tokens by kind, `times` so many."""
    return {kind: times * math.fsum(each[kind] for each in spent) / len(spent) for kind in KINDS_OF_TOKENS}


def level_positions(plan: SamplingPlan) -> list[range]:
    """The positions of each level's traces: the search, then the answers of each level's sets."""
    positions = [range(plan.search_traces)]
    for level in plan.levels:
        first = positions[-1].stop
        positions.append(range(first, first + level.sets * plan.answers))
    return positions


def level_budgets(plan: SamplingPlan, longest: int) -> list[int]:
    """The most tokens that may be generated up to and with each level; `longest` is rollout.sampling.max_response_tokens."""
    limits = [plan.max_tokens, *(level.max_tokens for level in plan.levels)]
    budgets, total = [], 0
    for positions, limit in zip(level_positions(plan), limits, strict=True):
        total += len(positions) * (limit or longest)
        budgets.append(total)
    return budgets
