"""Plans of several levels: each set waits for its members, shows exactly those, and keeps to its own budget."""

import numpy as np
import pytest

from spiral_mega.algorithm.sampling_plan import Level, SamplingPlan
from spiral_mega.algorithm.sets import sample_sets
from spiral_mega.rollout.engine import RequestKey
from spiral_mega.traces import AGGREGATION, SEARCH
from tests.rollout.scripted import (
    ASSISTANT,
    USER,
    ScriptedEngine,
    first_come,
    last_come,
    pipeline_of,
    problem,
    settings,
    shuffled,
    task,
    word,
)
from tests.support.tiny_models import END_ID

pytestmark = pytest.mark.usefixtures("runtime")
COMPONENT = [AGGREGATION] * 3 + ["aggregation_2"] * 2
TASKS = [task(problem(name, f"w{i} w80")) for i, name in enumerate("ab")]
PLAN = SamplingPlan(
    4,
    aggregation_traces=2,
    levels=(Level(3, 2, "independent", 5), Level(2, 4, "independent")),
    max_tokens=3,
)


def run(engine, verifier, plan=PLAN, **sections):
    return pipeline_of(engine, verifier, settings(**sections), plan=plan).run(TASKS)


@pytest.mark.parametrize("pick", [first_come, last_come, shuffled(1)])
def test_each_level_answers_sets_of_the_one_before_and_is_shown_exactly_those(verifier, pick):
    engine = ScriptedEngine(pick)
    for index, episode in enumerate(run(engine, verifier)):
        asked = {
            request.key: request for request in engine.requests if request.key.episode == index
        }
        traces = episode.traces()
        assert [len(traces), len(episode.sets)] == [4 + 2 * (3 + 2), 5]
        for l, members in enumerate(episode.sets):
            shown = []
            for member in members:
                body = [token for token in traces[member].response_ids if token != END_ID]
                shown += [word(93 if traces[member].finish == "stop" else 94), *body]
            prompt = [USER, word(90), word(index), word(80), word(91), *shown, word(92), ASSISTANT]
            assert asked[RequestKey(index, COMPONENT[l], l)].prompt_ids == prompt
            assert all(trace.prompt_ids == prompt for trace in episode.aggregation[l])


def test_a_set_starts_at_the_very_moment_its_last_member_ends_on_every_level(verifier):
    engine = ScriptedEngine(shuffled(2))
    plan = SamplingPlan(
        4, aggregation_traces=2, levels=(Level(3, 2, "independent"), Level(2, 2, "independent"))
    )
    for index, episode in enumerate(run(engine, verifier, plan)):
        for l, members in enumerate(episode.sets):
            traces = [episode.traces()[member] for member in members]
            keys = [(RequestKey(index, t.component, t.set_index), t.index) for t in traces]
            end = max(engine.events.index(("done", key)) for key in keys)
            added = engine.events.index(("add", RequestKey(index, COMPONENT[l], l)))
            assert all(kind == "add" for kind, _ in engine.events[end + 1 : added])


def test_the_order_of_completion_changes_nothing(verifier):
    expected = run(ScriptedEngine(first_come), verifier)
    assert run(ScriptedEngine(last_come), verifier) == expected
    assert run(ScriptedEngine(shuffled(3)), verifier) == expected


def test_every_level_keeps_to_its_own_budget(verifier):
    engine = ScriptedEngine(first_come)
    run(engine, verifier)
    limits = {request.key[1:3]: request.max_tokens for request in engine.requests}
    first = {(COMPONENT[l], l): 5 for l in range(3)} | {(COMPONENT[l], l): 8 for l in (3, 4)}
    assert limits == {(SEARCH, None): 3} | first


def test_sets_of_answers_that_had_no_room_are_answered_all_the_same(verifier):
    """A level whose prompts are longer than the context leaves empty, cut traces; the next level is shown those."""
    plan = SamplingPlan(8, levels=(Level(2, 8, "independent"), Level(1, 2, "independent")))
    (first, _) = run(
        ScriptedEngine(first_come),
        verifier,
        plan,
        rollout={"sampling.max_context_tokens": 24, "sampling.max_response_tokens": 6},
    )
    (a,), (b,), (last,) = first.aggregation
    assert [(t.response_ids, t.finish, t.reward) for t in (a, b)] == [([], "length", 0.0)] * 2
    assert first.sets[2] in ((8, 9), (9, 8))
    assert last.prompt_ids == [
        USER,
        word(90),
        word(0),
        word(80),
        word(91),
        word(94),
        word(94),
        word(92),
        ASSISTANT,
    ]
    assert last.response_ids


def test_the_plan_of_training_draws_what_the_algorithm_draws(verifier):
    config = settings(algorithm={"set_design": "balanced", "num_sets": 4})
    ours = SamplingPlan.from_algorithm(config.algorithm).draw_sets(np.random.default_rng(3))
    assert [spec.members for spec in ours] == sample_sets(
        6, 3, 4, rng=np.random.default_rng(3), method="balanced"
    )
