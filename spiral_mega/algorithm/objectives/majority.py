"""Majority: search traces learn to be right where a vote among `set_size` of them decides
(self-consistency).

f(x, G) = the reward of the answer that most traces of G state; of answers with as many votes, the
mean. E[update] = M grad E[f] (see algorithm/set_objective.py). Answers are told apart by how they
are spelt, as the kind's `answer_of` reads them: credit has no time to ask the verifier about each
pair.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from spiral_mega.algorithm.objectives import NoOptions
from spiral_mega.algorithm.set_objective import SetObjective
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.rewards.agreement import load_answer_of
from spiral_mega.traces import Problem, Trace


def score(problem: Problem, traces: Sequence[Trace]) -> float:
    """The mean reward of the most frequent answers. Traces that state none have no vote; without any vote, 0."""
    answer_of, rewards = load_answer_of(problem.verifier), defaultdict(list)
    for trace in traces:
        if (answer := answer_of(trace.answer_text)) is not None:
            rewards[answer].append(trace.reward)
    most = max(map(len, rewards.values()), default=0)
    winners = [sum(each) / len(each) for each in rewards.values() if len(each) == most]
    return sum(winners) / len(winners) if winners else 0.0


def build(config: AlgorithmConfig, options: NoOptions) -> SetObjective:
    """The recipe."""
    return SetObjective(config, score)
