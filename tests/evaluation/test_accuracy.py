"""Held-out accuracy against means taken by hand, over any number of ranks, from seeds that are always the same."""

from collections import Counter

import pytest

from spiral_mega.config import AlgorithmConfig
from spiral_mega.evaluation.accuracy import measure_accuracy
from spiral_mega.rollout.episode_builder import Task
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, Trace
from tests.rollout.launches import of_ranks
from tests.rollout.rank_jobs import scripted_evaluation
from tests.rollout.scripted import ScriptedPipeline, problem

PROBLEMS, REPEATS = 5, 3


def by_hand(run_seed, problems=PROBLEMS, repeats=REPEATS):
    """The means over all episodes of the scripted pipeline, in one place."""
    pipeline = ScriptedPipeline(0.5, AlgorithmConfig(search_traces=2))
    search, answers, passed = [], [], []
    for i in range(problems):
        for repeat in range(repeats):
            task = Task(problem(f"p{i}"), -1, (run_seed, "eval", f"p{i}", repeat))
            episode = pipeline.episode(0, task)
            search += [trace.reward for trace in episode.search]
            answers += [trace.reward for group in episode.aggregation for trace in group]
            passed.append(any(trace.reward >= 1 for trace in episode.search))
    return {
        "eval/search_accuracy": sum(search) / len(search),
        "eval/pass@2": sum(passed) / len(passed),
        "eval/aggregation_accuracy": sum(answers) / len(answers),
    }


class FixedPipeline:
    """Always the same rewards: searches [1, 0.5, 0, 0] and [0.9, 0.9, 0, 0] in turn, answers [[1, 0], [1, 1]]."""

    algorithm = AlgorithmConfig(search_traces=4)

    def run(self, tasks):
        rewards = [[1, 0.5, 0, 0], [0.9, 0.9, 0, 0]]
        return [self.episode(i, task, rewards[i % 2]) for i, task in enumerate(tasks)]

    def episode(self, index, task, rewards):
        def trace(component, i, reward, set_index=None):
            return Trace(component, i, [1], [2], [-1.0], "stop", "", set_index, float(reward))

        search = [trace(SEARCH, i, reward) for i, reward in enumerate(rewards)]
        groups = [
            [trace(AGGREGATION, i, r, l) for i, r in enumerate(row)]
            for l, row in enumerate([[1, 0], [1, 1]])
        ]
        return Episode(task.problem, task.step, search, [(0, 1), (2, 3)], groups, index=index)


def test_means_are_those_of_numbers_worked_out_by_hand(runtime):
    """A partial reward counts in the mean and is no pass."""
    metrics = measure_accuracy(FixedPipeline(), [problem("a"), problem("b")], 2, run_seed=0)
    assert metrics == {
        "eval/search_accuracy": pytest.approx((1.5 / 4 + 1.8 / 4) / 2),
        "eval/pass@4": 0.5,
        "eval/aggregation_accuracy": 0.75,
    }


@pytest.mark.parametrize(
    ("job", "counts"), [("evaluation", (PROBLEMS, REPEATS)), ("evaluation_of_one", (1, 1))]
)
def test_one_and_two_ranks_give_the_same_means_on_every_rank(runtime, job, counts):
    """Also when a rank has no problem at all."""
    expected = [by_hand(seed, *counts) for seed in (1, 1, 2)]
    for result in (scripted_evaluation(runtime, *counts), *of_ranks(2, job)):
        assert result["results"] == [pytest.approx(each) for each in expected]
    if job == "evaluation":
        assert expected[0] != expected[2], "another run seed samples other traces"


def test_every_evaluation_of_a_run_uses_the_same_seeds_and_each_only_once(runtime):
    for ranks in ([scripted_evaluation(runtime, PROBLEMS, REPEATS)], of_ranks(2, "evaluation")):
        first, again, other = (
            [parts for rank in ranks for parts in rank["tasks"][call]] for call in range(3)
        )
        assert Counter(first) == Counter(again)
        assert len(set(first)) == len(first) == PROBLEMS * REPEATS
        assert not set(first) & set(other)
