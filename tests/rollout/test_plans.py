"""What a plan asks for is what is sampled, and nothing besides: sets for credit alone; seeds and counts of levels."""

from dataclasses import replace

import pytest

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.algorithm.sampling_plan import Level, SamplingPlan
from spiral_mega.algorithm.weighting import component_totals
from spiral_mega.rollout.batch import Batch
from spiral_mega.rollout.engine import RequestKey
from spiral_mega.rollout.recording import Recorder, Replayer
from spiral_mega.traces import AGGREGATION, SEARCH
from tests.rollout.scripted import ScriptedEngine, first_come, pipeline_of, problem, settings, task

pytestmark = pytest.mark.usefixtures("runtime")
TASKS = [task(problem(name, f"w{i} w80")) for i, name in enumerate("ab")]
TWO_LEVELS = SamplingPlan(4, 2, (Level(3, 2, "uniform"), Level(2, 3, "ordered")))


def run(plan, verifier):
    engine = ScriptedEngine(first_come)
    pipeline = pipeline_of(engine, verifier, settings(), plan=plan)
    return engine, pipeline.run(TASKS)


def test_sets_that_are_for_credit_alone_are_shown_to_no_one(verifier):
    plan = make_objective(settings(algorithm={"objective": "passk"}).algorithm).plan
    engine, episodes = run(plan, verifier)
    assert [request.key for request in engine.requests] == [RequestKey(i, SEARCH) for i in range(2)]
    for episode in episodes:
        assert len(episode.sets) == 4
        assert all(len(set(chosen)) == 3 and max(chosen) < 6 for chosen in episode.sets)
        assert episode.aggregation == []
    assert episodes[0].sets != episodes[1].sets


def test_a_record_of_sets_for_credit_alone_is_replayed(verifier, runtime, tmp_path):
    objective = make_objective(settings(algorithm={"objective": "passk"}).algorithm)
    _, episodes = run(objective.plan, verifier)
    for episode in episodes:
        for trace in episode.search:
            trace.reward = float(trace.index == 0)
        objective.assign_credit(episode)
    batch = Batch(episodes, episodes, [0, 1], 2, 2, 0)

    class Collected:
        def collect(self, step, assign_credit):
            return batch

    Recorder(Collected(), str(tmp_path), runtime).collect(0, objective.assign_credit)
    replayed = Replayer(str(tmp_path), range(1), runtime).collect(0, objective.assign_credit)
    for got, made in zip(replayed.sampled, batch.sampled, strict=True):
        assert (got.sets, got.aggregation) == (made.sets, [])
        assert [t.advantage for t in got.search] == [t.advantage for t in made.search]
        assert any(t.advantage for t in got.search)


def test_no_two_samples_of_several_levels_share_a_seed(verifier):
    engine, _ = run(TWO_LEVELS, verifier)
    seeds = [request.seed + i for request in engine.requests for i in range(request.num_samples)]
    assert len(set(seeds)) == len(seeds) == 2 * 14


def test_traces_of_components_that_are_not_trained_are_not_counted(verifier):
    _, episodes = run(TWO_LEVELS, verifier)
    totals = component_totals(episodes, (AGGREGATION,))
    assert list(totals) == [AGGREGATION]
    assert totals[AGGREGATION].traces == 2 * 3 * 2
    assert totals[AGGREGATION].problems == 2


def test_evaluations_answer_no_more_sets_than_they_need_where_training_answers_none():
    many = settings(algorithm={"num_sets": 20}).algorithm
    for objective, sets in (("passk", 2), ("spiral", 20), ("grpo", 20)):
        training = make_objective(many.model_copy(update={"objective": objective})).plan
        plan = SamplingPlan.for_evaluation(many, training)
        assert (plan.levels[0].num_sets, plan.aggregation_traces, plan.search_traces) == (
            sets,
            2,
            6,
        )


def test_without_sets_nothing_follows_the_search(verifier):
    engine, episodes = run(replace(TWO_LEVELS, levels=()), verifier)
    assert len(engine.requests) == 2
    assert all((episode.sets, episode.aggregation) == ([], []) for episode in episodes)
