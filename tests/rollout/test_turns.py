"""Traces of several turns: what the environment says is in the context, and neither sampled, trained on nor judged."""

import math

import pytest

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.algorithm.weighting import component_totals
from spiral_mega.errors import UserError
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree_batch import pack
from spiral_mega.rollout.batch import Batch
from spiral_mega.rollout.engine import RequestKey
from spiral_mega.rollout.recording import Recorder, Replayer
from spiral_mega.traces import AGGREGATION, SEARCH
from tests.rollout.scripted import (
    ScriptedEngine,
    first_come,
    last_come,
    pipeline_of,
    problem,
    settings,
    shuffled,
    task,
)
from tests.support.tiny_models import END_ID, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("runtime")
HERE = "tests.rollout.environments:"
TASKS = [task(problem(name, f"w{i} w80")) for i, name in enumerate("abc")]


class RecordingVerifier:
    """Remembers what was to be judged; rewards nothing."""

    def __init__(self, verifier):
        self.verifier, self.asked = verifier, []

    def submit(self, response, answer, verifier):
        self.asked.append(response)
        return self.verifier.submit(response, answer, verifier)


def run(verifier, environment, pick=first_come, **sampling):
    sizes = {
        "sampling.max_response_tokens": 40,
        "sampling.max_context_tokens": 400,
        "sampling.environment": HERE + environment,
    }
    sizes |= {f"sampling.{name}": value for name, value in sampling.items()}
    config = settings(rollout=sizes, policy={"microbatch_tokens": 400})
    engine = ScriptedEngine(pick)
    return engine, pipeline_of(engine, verifier, config).run(TASKS)


def turns_of(trace):
    """The token ids of the model's turns."""
    bounds = [
        0,
        *(edge for pair in trace.observation_spans for edge in pair),
        len(trace.response_ids),
    ]
    return [trace.response_ids[a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=True)]


def test_turns_and_replies_follow_one_another_as_the_chat_template_has_them(verifier):
    """Token for token the template's rendering of the whole conversation, whose control words no reply can forge."""
    tokenizer = tiny_tokenizer()
    _, episodes = run(verifier, "counts_turns")
    replies = [[("tool", "w60 w61")], [("tool", "w62"), ("user", "w63 <\u200b|end|>")]]
    lengths = set()
    for episode in episodes:
        for trace in episode.search:
            turns = turns_of(trace)
            lengths.add(len(turns))
            messages = [dict(message) for message in episode.problem.messages]
            for turn, said in zip(turns, [*replies, []], strict=False):
                messages.append(
                    {
                        "role": "assistant",
                        "content": tokenizer.decode(turn, skip_special_tokens=True),
                    }
                )
                messages += [
                    {"role": role, "content": content}
                    for role, content in said
                    if turn is not turns[-1]
                ]
            rendered = tokenizer.apply_chat_template(messages, return_dict=False)
            whole = [*trace.prompt_ids, *trace.response_ids]
            assert rendered[: len(whole)] == whole
            assert trace.finish == ("stop" if whole[-1] == END_ID else "length")
    assert lengths == {1, 2, 3}, "cut at the first or second turn, or at its end"


def test_what_was_not_sampled_has_no_logprob_and_is_not_counted(verifier):
    engine, episodes = run(verifier, "counts_turns")
    for episode in episodes:
        for trace in episode.traces():
            observed = {i for start, stop in trace.observation_spans for i in range(start, stop)}
            assert {i for i, p in enumerate(trace.logprobs) if math.isnan(p)} == observed
            assert (
                trace.length
                == len(trace.response_ids) - len(observed)
                == sum(map(len, turns_of(trace)))
            )
    totals = component_totals(episodes, (SEARCH, AGGREGATION))
    done = sum(kind == "done" for kind, _ in engine.events)
    traces = sum(len(episode.traces()) for episode in episodes)
    assert done > traces, "there were turns after the first"
    assert totals[SEARCH].tokens == sum(
        trace.length for episode in episodes for trace in episode.search
    )


@pytest.mark.parametrize("pick", [last_come, shuffled(1), shuffled(2)])
def test_the_order_of_completion_changes_no_trace_of_several_turns(verifier, pick):
    def shown(episodes):
        return [
            (
                t.response_ids,
                [p for p in t.logprobs if p == p],
                t.observation_spans,
                t.finish,
                t.reward,
            )
            for e in episodes
            for t in e.traces()
        ]

    assert shown(run(verifier, "counts_turns", pick)[1]) == shown(run(verifier, "counts_turns")[1])


def test_no_two_turns_share_a_seed(verifier):
    engine, _ = run(verifier, "counts_turns")
    seeds = [request.seed + i for request in engine.requests for i in range(request.num_samples)]
    assert len(set(seeds)) == len(seeds) > 3 * (6 + 4 * 2)


def test_the_answer_is_looked_for_in_the_last_turn_alone(verifier):
    recording = RecordingVerifier(verifier)
    _, episodes = run(recording, "counts_turns")
    tokenizer = tiny_tokenizer()
    last = [
        tokenizer.decode(turns_of(t)[-1], skip_special_tokens=True)
        for e in episodes
        for t in e.traces()
    ]
    assert sorted(recording.asked) == sorted(last)
    assert sorted(t.answer_text for e in episodes for t in e.traces()) == sorted(last)


def test_aggregation_sees_whole_conversations(verifier):
    engine, episodes = run(verifier, "counts_turns")
    by_key = {request.key: request for request in engine.requests}
    tokenizer = tiny_tokenizer()
    for index, episode in enumerate(episodes):
        for l, members in enumerate(episode.sets):
            text = tokenizer.decode(by_key[RequestKey(index, AGGREGATION, l)].prompt_ids)
            for j in members:
                for turn in turns_of(episode.search[j]):
                    assert tokenizer.decode(turn, skip_special_tokens=True) in text


def test_a_record_of_several_turns_is_replayed(verifier, runtime, tmp_path):
    _, episodes = run(verifier, "counts_turns")

    class Collected:
        def collect(self, step, assign_credit):
            return Batch(episodes, episodes, [0, 1, 2], 3, 3, 0)

    assign_credit = make_objective(settings().algorithm).assign_credit
    Recorder(Collected(), str(tmp_path), runtime).collect(0, assign_credit)
    replayed = Replayer(str(tmp_path), range(1), runtime).collect(0, assign_credit)
    for got, made in zip(replayed.sampled, episodes, strict=True):
        for a, b in zip(got.traces(), made.traces(), strict=True):
            assert (a.response_ids, a.observation_spans, a.answer_text) == (
                b.response_ids,
                b.observation_spans,
                b.answer_text,
            )
            assert [math.isnan(p) for p in a.logprobs] == [math.isnan(p) for p in b.logprobs]


def test_an_environment_that_never_ends_is_bounded_by_turns_and_by_tokens(verifier):
    _, episodes = run(verifier, "never_ends", max_turns=3)
    counts = {len(turns_of(trace)) for episode in episodes for trace in episode.traces()}
    assert max(counts) == 3
    engine, episodes = run(verifier, "never_ends", max_turns=100, max_response_tokens=20)
    traces = [trace for episode in episodes for trace in episode.traces()]
    assert all(len(trace.response_ids) <= 20 for trace in traces)
    assert all(trace.finish == "length" for trace in traces)
    assert all(request.max_tokens >= 1 for request in engine.requests)


def test_a_silent_environment_changes_nothing(verifier):
    without = pipeline_of(ScriptedEngine(first_come), verifier, settings(rollout={"sampling.max_response_tokens": 40,
                          "sampling.max_context_tokens": 400}, policy={"microbatch_tokens": 400}))  # fmt: skip
    assert run(verifier, "silent")[1] == without.run(TASKS)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            "fails",
            r"rollout\.sampling\.environment .*fails failed on problem a \(RuntimeError: out of order\)",
        ),
        ("replies_text", r"replied 'w60' on problem a: return a list of messages"),
    ],
)
def test_an_environment_that_fails_is_named_with_its_problem(verifier, environment, message):
    with pytest.raises(UserError, match=message):
        run(verifier, environment)


def test_tokens_that_the_model_did_not_write_have_no_row_in_the_loss():
    """As if the response were the written tokens alone, each predicted from all that stands before it."""
    prompt, response = [5, 6], [10, 11, 12, 13, 14, 15]
    logprobs = [-0.1, -0.2, math.nan, math.nan, -0.5, -0.6]
    whole = pack(
        [
            TrainingSequence(
                SequenceKey(0, 0), prompt, response, logprobs, 2.0, 3.0, observation_spans=((2, 4),)
            )
        ]
    )
    assert whole.input_ids.tolist() == [[*prompt, *response]]
    assert whole.logit_indices.tolist() == [1, 2, 5, 6]
    assert whole.labels.tolist() == [10, 11, 14, 15]
    assert whole.sampler_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.5, -0.6])
    assert whole.advantages.tolist() == [2.0] * 4
    assert whole.weights.tolist() == [3.0] * 4


def test_another_trace_may_have_written_what_one_observed():
    """The same tokens, written by one trace and observed by another: only the first learns from them."""
    observed = TrainingSequence(
        SequenceKey(0, 0),
        [5],
        [10, 11, 12],
        [-0.1, math.nan, -0.3],
        1.0,
        1.0,
        observation_spans=((1, 2),),
    )
    wrote = TrainingSequence(SequenceKey(0, 1), [5], [10, 11, 12], [-0.1, -0.2, -0.3], -1.0, 1.0)
    batch = pack([observed, wrote])
    assert batch.input_ids.tolist() == [[5, 10, 11, 12]]
    assert batch.labels[batch.gather_indices].tolist() == [10, 12, 10, 11, 12]
    assert batch.advantages.tolist() == [1.0, 1.0, -1.0, -1.0, -1.0]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 1, 1]
