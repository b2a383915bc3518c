"""From search to aggregation: a set waits for its own members and for nothing else, and order changes nothing."""

import itertools
from concurrent.futures import Future
from dataclasses import replace

import pytest

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.algorithm.weighting import component_totals, make_weighting
from spiral_mega.rewards import Verdict, VerifierPool
from spiral_mega.rollout.batch import Batch
from spiral_mega.rollout.batch_metrics import batch_metrics
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
VERIFIERS = "tests.rollout.verifiers:"
TASKS = [task(problem(name, f"w{i} w80")) for i, name in enumerate("abc")]
DESIGNS = [("uniform", 4), ("ordered", 5), ("balanced", 6)]


class RecordingVerifier:
    """A verifier that is asked, answered by a real one."""

    def __init__(self, verifier: VerifierPool) -> None:
        self.verifier = verifier
        self.asked: list[str] = []

    def submit(self, response: str, answer: tuple[str, ...], verifier: str) -> Future[Verdict]:
        self.asked.append(response)
        return self.verifier.submit(response, answer, verifier)


def run(engine, verifier, config=None, tasks=TASKS, **more):
    return pipeline_of(engine, verifier, config or settings(), **more).run(tasks)


@pytest.mark.parametrize("pick", [first_come, last_come, shuffled(1), shuffled(2)])
@pytest.mark.parametrize(("design", "num_sets"), DESIGNS)
def test_a_set_is_requested_at_the_very_moment_its_last_member_ends(
    verifier, pick, design, num_sets
):
    config = settings(algorithm={"set_design": design, "num_sets": num_sets})
    engine = ScriptedEngine(pick)
    episodes = run(engine, verifier, config)
    early = 0
    for index, episode in enumerate(episodes):
        assert len(episode.sets) == num_sets
        for l, members in enumerate(episode.sets):
            ends = [engine.events.index(("done", (RequestKey(index, SEARCH), j))) for j in members]
            added = engine.events.index(("add", RequestKey(index, AGGREGATION, l)))
            between = engine.events[max(ends) + 1 : added]
            assert max(ends) < added
            assert all(kind == "add" for kind, _ in between), (
                "only other sets that became ready with the same trace"
            )
            early += any(
                kind == "done" and sample[0].component == SEARCH
                for kind, sample in engine.events[added:]
            )
    assert early > 0, "some set started while searches were running"


@pytest.mark.parametrize(("design", "num_sets"), DESIGNS)
def test_the_order_of_completion_changes_no_episode(verifier, design, num_sets):
    config = settings(algorithm={"set_design": design, "num_sets": num_sets})
    expected = run(ScriptedEngine(first_come), verifier, config)
    for pick in (last_come, shuffled(3), shuffled(4), shuffled(5)):
        assert run(ScriptedEngine(pick), verifier, config) == expected


@pytest.mark.parametrize("pick", [first_come, shuffled(3)])
def test_a_random_order_changes_the_listing_of_sets_and_nothing_else(verifier, pick):
    ascending = run(ScriptedEngine(first_come), verifier)
    listed = run(ScriptedEngine(pick), verifier, settings(algorithm={"set_order": "random"}))
    assert listed == run(
        ScriptedEngine(last_come), verifier, settings(algorithm={"set_order": "random"})
    )
    for ours, theirs in zip(listed, ascending, strict=True):
        assert [tuple(sorted(members)) for members in ours.sets] == theirs.sets
        assert ours.search == theirs.search
    assert any(ours.sets != theirs.sets for ours, theirs in zip(listed, ascending, strict=True))


def test_steps_that_finish_nothing_change_nothing(verifier):
    assert run(ScriptedEngine(first_come, idle_steps=3), verifier) == run(
        ScriptedEngine(first_come), verifier
    )


def test_an_episode_does_not_depend_on_the_other_tasks_or_its_place_among_them(verifier):
    expected = dict(zip("abc", run(ScriptedEngine(first_come), verifier), strict=True))
    for order in itertools.permutations(TASKS):
        for episode in run(ScriptedEngine(shuffled(6)), verifier, tasks=order):
            assert (
                replace(episode, index=expected[episode.problem.id].index)
                == expected[episode.problem.id]
            )
    assert run(ScriptedEngine(first_come), verifier, tasks=TASKS[1:2]) == [
        replace(expected["b"], index=0)
    ]
    assert run(ScriptedEngine(first_come), verifier, tasks=[]) == []


def test_one_request_asks_for_all_searches_and_one_for_all_answers_to_a_set(verifier):
    engine = ScriptedEngine(shuffled(7))
    run(engine, verifier)
    shapes = sorted((r.key.episode, r.key.component, r.num_samples) for r in engine.requests)
    assert shapes == sorted(
        [(i, SEARCH, 6) for i in range(3)] + [(i, AGGREGATION, 2) for i in range(3)] * 4
    )
    assert len({request.key for request in engine.requests}) == len(engine.requests)


def test_no_two_samples_of_a_run_share_a_seed(verifier):
    engine = ScriptedEngine(first_come)
    twice = [
        task(TASKS[0].problem, occurrence, step=step)
        for occurrence in range(3)
        for step in range(3)
    ]
    run(engine, verifier, tasks=[*TASKS, *twice])
    seeds = [request.seed + i for request in engine.requests for i in range(request.num_samples)]
    assert len(set(seeds)) == len(seeds) == 12 * (6 + 4 * 2)
    assert all(0 <= seed < 2**62 + 6 for seed in seeds)


@pytest.mark.parametrize(("design", "num_sets"), DESIGNS)
def test_an_aggregation_prompt_shows_exactly_the_traces_of_its_set_in_its_order(
    verifier, design, num_sets
):
    config = settings(algorithm={"set_design": design, "num_sets": num_sets})
    engine = ScriptedEngine(shuffled(8))
    episodes = run(engine, verifier, config)
    by_key = {request.key: request for request in engine.requests}
    for index, episode in enumerate(episodes):
        asked = [word(index), word(80)]
        search_prompt = [USER, *asked, ASSISTANT]
        assert by_key[RequestKey(index, SEARCH)].prompt_ids == search_prompt
        assert all(trace.prompt_ids == search_prompt for trace in episode.search)
        for l, members in enumerate(episode.sets):
            shown = []
            for j in members:
                trace = episode.search[j]
                mark = 93 if trace.finish == "stop" else 94
                shown += [word(mark), *(token for token in trace.response_ids if token != END_ID)]
            expected = [USER, word(90), *asked, word(91), *shown, word(92), ASSISTANT]
            assert by_key[RequestKey(index, AGGREGATION, l)].prompt_ids == expected
            assert [trace.prompt_ids for trace in episode.aggregation[l]] == [expected] * 2
    if design == "ordered":
        assert any(
            list(members) != sorted(members) for episode in episodes for members in episode.sets
        )


def test_traces_carry_what_the_engine_sampled_and_stand_at_their_index(verifier):
    engine = ScriptedEngine(last_come)
    handed_out = {}
    plain_step = engine.step

    def step():
        samples = plain_step()
        handed_out.update({(sample.key, sample.index): sample for sample in samples})
        return samples

    engine.step = step
    for index, episode in enumerate(run(engine, verifier)):
        places = [(RequestKey(index, SEARCH), i, trace) for i, trace in enumerate(episode.search)]
        for l, group in enumerate(episode.aggregation):
            places += [
                (RequestKey(index, AGGREGATION, l), i, trace) for i, trace in enumerate(group)
            ]
        for key, i, trace in places:
            sample = handed_out.pop((key, i))
            assert (trace.component, trace.index, trace.set_index) == (
                key.component,
                i,
                key.set_index,
            )
            assert (trace.response_ids, trace.logprobs) == (sample.token_ids, sample.logprobs)
            assert trace.finish == sample.finish
            words = [f"w{token - word(0)}" for token in sample.token_ids if token != END_ID]
            assert trace.text == " ".join(words)
    assert not handed_out


@pytest.mark.parametrize("context", range(20, 60, 3))
def test_prompt_and_response_never_exceed_the_context(verifier, context):
    rollout = {"sampling.max_response_tokens": 8, "sampling.max_context_tokens": context}
    # the longest aggregation prompts do not fit; a view by answer is what lets a configuration risk that
    config = settings(rollout=rollout, prompts={"view": "answer"}, data={"max_prompt_tokens": 6})
    engine = ScriptedEngine(shuffled(context))
    episodes = run(engine, verifier, config, tasks=TASKS * 3)
    for request in engine.requests:
        assert request.max_tokens == min(8, context - len(request.prompt_ids))
        assert request.max_tokens >= 1
    for episode in episodes:
        for group in episode.aggregation:
            full = len(group[0].prompt_ids) >= context
            assert all((trace.length == 0) == full for trace in group)


def no_room(verifier, kind, **algorithm):
    """Episodes of which some aggregation prompts leave no room for an answer."""
    rollout = {"sampling.max_response_tokens": 8, "sampling.max_context_tokens": 24}
    config = settings(
        rollout=rollout,
        prompts={"view": "answer"},
        data={"max_prompt_tokens": 6},
        algorithm=algorithm,
    )
    tasks = [task(problem(f"p{i}", verifier=VERIFIERS + kind, answer="0/2")) for i in range(8)]
    return config, run(ScriptedEngine(first_come), verifier, config, tasks=tasks)


def test_a_set_without_room_for_an_answer_has_empty_cut_traces_of_reward_0_that_nobody_judged(
    verifier,
):
    """Even a verifier that likes silence does not reward them."""
    recording = RecordingVerifier(verifier)
    _, episodes = no_room(recording, "likes_silence")
    groups = [group for episode in episodes for group in episode.aggregation]
    full = [group for group in groups if len(group[0].prompt_ids) >= 24]
    assert 0 < len(full) < len(groups)
    for group in full:
        assert [trace.index for trace in group] == [0, 1]
        for trace in group:
            assert (trace.component, trace.response_ids, trace.logprobs, trace.text) == (
                AGGREGATION,
                [],
                [],
                "",
            )
            assert (trace.finish, trace.reward, trace.verification) == ("length", 0.0, "ok")
    assert len({id(trace) for group in full for trace in group}) == 2 * len(full)
    assert len(recording.asked) == sum(
        trace.length > 0 for episode in episodes for trace in episode.traces()
    )


@pytest.mark.parametrize("reduction", ["sum", "token_mean", "sequence_mean"])
def test_empty_traces_pass_through_credit_weights_and_metrics(verifier, reduction):
    config, episodes = no_room(verifier, "word_sum", loss_reduction=reduction, target_length=5)
    objective = make_objective(config.algorithm)
    for episode in episodes:
        objective.assign_credit(episode)
    totals = component_totals(episodes, objective.components)
    weighting = make_weighting(config.algorithm, objective)
    traces = [trace for episode in episodes for trace in episode.traces()]
    empty = [trace for trace in traces if not trace.length]
    assert empty
    assert all(trace.advantage == 0 for trace in empty)
    assert all(weighting.trace_weight(trace, totals) > 0 for trace in traces if trace.length)
    metrics = batch_metrics(Batch(episodes, episodes, list(range(8)), 8, 8, 0))
    answers = [trace for trace in traces if trace.component == AGGREGATION]
    assert metrics["truncated/aggregation"] == pytest.approx(
        sum(t.finish == "length" for t in answers) / len(answers)
    )
    assert metrics["length/aggregation"] == pytest.approx(
        sum(t.length for t in answers) / len(answers)
    )


def test_rewards_are_the_verifiers_on_every_trace(verifier):
    tasks = [
        task(problem(f"p{i}", verifier=VERIFIERS + "word_sum", answer=f"{i % 3}/3"))
        for i in range(4)
    ]
    episodes = run(ScriptedEngine(shuffled(9)), verifier, tasks=tasks)
    rewards = set()
    for i, episode in enumerate(episodes):
        for trace in episode.traces():
            total = sum(token - word(0) for token in trace.response_ids if token != END_ID)
            assert (trace.reward, trace.verification) == (float(total % 3 == i % 3), "ok")
            rewards.add(trace.reward)
    assert rewards == {0.0, 1.0}


def test_a_trace_records_how_its_verification_failed():
    statuses = {"w0": "ok", "w1": "timeout", "w2": "crash", "w3": "error", "w4": "error"}
    config = settings(algorithm={"search_traces": 6, "num_sets": 1, "aggregation_traces": 1})
    tasks = [task(problem(f"p{i}", verifier=VERIFIERS + "fails_by_first_word")) for i in range(3)]
    with VerifierPool(time_limit_s=0.7, workers=2, verifiers=("exact",)) as impatient:
        episodes = run(ScriptedEngine(first_come), impatient, config, tasks=tasks)
    seen = set()
    for trace in (trace for episode in episodes for trace in episode.traces()):
        status = statuses.get(trace.text.split()[0], "ok")
        assert (trace.verification, trace.reward) == (status, float(status == "ok"))
        seen.add(status)
    assert seen == {"ok", "timeout", "crash", "error"}


def test_without_aggregation_there_are_searches_and_nothing_else(verifier):
    engine = ScriptedEngine(first_come)
    episodes = run(engine, verifier, plan=SamplingPlan(settings().algorithm.search_traces))
    assert [request.key for request in engine.requests] == [RequestKey(i, SEARCH) for i in range(3)]
    assert all((episode.sets, episode.aggregation) == ([], []) for episode in episodes)
    whole = run(ScriptedEngine(first_come), verifier)
    assert [episode.search for episode in episodes] == [episode.search for episode in whole]
