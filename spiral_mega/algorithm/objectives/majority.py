"""Majority: search traces learn to be right under a majority vote of `set_size` traces.

f(x, G) = the reward of the answer that most traces of G state; for a tie, the mean over the tied
answers. E[update] = M grad E[f] (see algorithm/set_objective.py). Answers are compared as text, as
the verifier's `answer_of` extracts them: asking the verifier about each pair would take too long.
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
    """Return the mean reward of the most frequent answers; 0 if no trace states an answer."""
    answer_of = load_answer_of(problem.verifier)
    rewards_by_answer = defaultdict(list)
    for trace in traces:
        answer = answer_of(trace.answer_text)
        if answer is not None:
            rewards_by_answer[answer].append(trace.reward)
    max_votes = max(map(len, rewards_by_answer.values()), default=0)
    winners = [
        sum(each) / len(each) for each in rewards_by_answer.values() if len(each) == max_votes
    ]
    return sum(winners) / len(winners) if winners else 0.0


def build(config: AlgorithmConfig, options: NoOptions) -> SetObjective:
    """Build the recipe."""
    return SetObjective(config, score)
