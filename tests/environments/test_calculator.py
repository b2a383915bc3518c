"""The calculator's values, and traces that use it: sampled by a real engine, trained by the real policy."""

import json
import math
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.distributed.runtime import Runtime, start_runtime
from spiral_mega.environments.calculator import calculate, reply
from spiral_mega.models.tokenizer import load_tokenizer, stop_ids
from spiral_mega.models.weights import pretrained_weights
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.policy import build_policy
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards import VerifierPool
from spiral_mega.rollout import build_engine
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.telemetry.trace_file import read_traces
from spiral_mega.traces import Episode, Problem, Trace
from tests.e2e.runs import TrainingRun
from tests.environments.calculator_model import save_calculator_model
from tests.rollout.scripted import task
from tests.support.configs import make_config

PROBLEM = Problem("p", ({"role": "user", "content": "?"},), ("1",), "exact")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * (3 + 4)", "14"),
        ("-7 / 2", "-3.5"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333"),
        ("2 - -2", "4"),
        (" 007 ", "error: not an arithmetic expression"),
        ("1 / (2 - 2)", "error: division by zero"),
        ("2 ** 9999", "error: not an arithmetic expression"),
        ("__import__('os')", "error: not an arithmetic expression"),
        ("True + 1", "error: not an arithmetic expression"),
        ("1 if 1 else 2", "error: not an arithmetic expression"),
        ("1\n+2", "error: not an arithmetic expression"),
        ("", "error: not an arithmetic expression"),
        ("1e300 * 1e300 * 1e300", "error: too large"),
        ("-1e61", "error: too large"),
        ("1e999", "error: not an arithmetic expression"),
        ("1e-200 * 1e-200", "0"),
        ("(" * 199, "error: not an arithmetic expression"),
        ("1" * 201, "error: longer than 200 characters"),
    ],
)
def test_values_and_errors(text: str, value: str) -> None:
    assert calculate(text) == value


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 10**9)), min_size=1, max_size=8))
@settings(deadline=None)
def test_values_are_exact(terms: list[tuple[str, int]]) -> None:
    text = "1" + "".join(f" {sign} {number}" for sign, number in terms)
    assert calculate(text) == str(Fraction(eval(text)))


@given(st.text(alphabet="0123456789+-*/(). e_", max_size=200))
@settings(deadline=None)
def test_whatever_is_asked_is_answered_soon(text: str) -> None:
    started = time.process_time()
    assert isinstance(calculate(text), str)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("turn", "replies"),
    [
        ("I need <calc>6*7</calc>", ["42"]),
        ("<calc>1</calc> then <calc>2</calc> \n", ["2"]),
        ("<calc>1</calc> it is", []),
        ("<calc>1", []),
        ("nothing", []),
        ("<calc><calc>2+2</calc>", ["4"]),
    ],
)
def test_a_turn_that_ends_in_a_call_is_answered(turn: str, replies: list[str]) -> None:
    answered = reply(
        PROBLEM,
        [{"role": "user", "content": "<calc>9</calc>"}, {"role": "assistant", "content": turn}],
    )
    assert answered == [{"role": "tool", "content": content} for content in replies]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with start_runtime() as alone:
        yield alone


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_calculator_model(tmp_path_factory.mktemp("calculator") / "model", steps=150)


SIZES = {"sampling.max_response_tokens": 16, "sampling.max_context_tokens": 128}


def sums(count: int) -> list[Problem]:
    pairs = [(1 + 7 * i % 19, 1 + 5 * i % 20) for i in range(count)]
    return [
        Problem(f"{a}+{b}", ({"role": "user", "content": f"{a} + {b}"},), (str(a + b),), "exact")
        for a, b in pairs
    ]


def sample(folder: Path, runtime: Runtime, environment: str | None) -> list[Episode]:
    config = make_config(
        folder, rollout=SIZES | {"sampling.environment": environment}, prompts={"instruction": ""}
    )
    tokenizer = load_tokenizer(config.model)
    engine = build_engine(config, stop_ids(config.model, tokenizer), runtime)
    engine.load_weights(pretrained_weights(str(folder)))
    with VerifierPool(10.0, 1, ("exact",)) as verifier:
        prompter, plan = (
            Prompter(config.prompts, tokenizer),
            SamplingPlan(config.algorithm.search_traces),
        )
        pipeline = Pipeline(
            engine, prompter, verifier, tokenizer, config.algorithm, config.rollout, plan=plan
        )
        return pipeline.run([task(each) for each in sums(8)])


def searches(episodes: list[Episode]) -> list[Trace]:
    return [trace for episode in episodes for trace in episode.search]


def test_a_model_that_calls_the_calculator_is_right_with_it_and_lost_without(
    taught: Path, runtime: Runtime
) -> None:
    with_it, without = (searches(sample(taught, runtime, each)) for each in ("calculator", None))
    assert sum(trace.reward for trace in with_it) / len(with_it) > 0.8
    assert sum(trace.reward for trace in without) == 0
    assert sum(bool(trace.observation_spans) for trace in with_it) > 0.8 * len(with_it)
    assert not any(trace.observation_spans for trace in without)


def test_the_policy_gives_each_written_token_the_samplers_probability(
    taught: Path, runtime: Runtime
) -> None:
    """So the context of every turn is the one that it was sampled in; what the tool said has no loss."""
    traces = [
        trace
        for trace in searches(sample(taught, runtime, "calculator"))
        if trace.observation_spans
    ]
    policy = build_policy(make_config(taught, policy={"microbatch_tokens": 4096}), runtime)
    sequences = [
        TrainingSequence(
            SequenceKey(0, i),
            t.prompt_ids,
            t.response_ids,
            t.logprobs,
            1.0,
            1e-3,
            tuple(t.observation_spans),
        )
        for i, t in enumerate(traces)
    ]
    sampled = torch.tensor([p for trace in traces for p in trace.logprobs if not math.isnan(p)])
    assert len(sampled) == sum(trace.length for trace in traces)
    assert float((policy.logprobs(sequences) - sampled).abs().max()) < 1e-4
    metrics = policy.update([sequences])
    assert metrics["train/tokens"] == len(sampled)
    assert metrics["sampler/masked_tokens"] == 0
    assert metrics["sampler/log_ratio_abs_max"] < 1e-4


@pytest.mark.slow
def test_the_trainer_learns_from_traces_of_two_turns(tmp_path: Path, taught: Path) -> None:
    """The whole loop: the policy that is trained gives what the engine samples after each sync, tool or none."""
    data = tmp_path / "sums.jsonl"
    rows = [
        {"id": p.id, "problem": p.messages[0]["content"], "answer": p.answer[0]} for p in sums(16)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "calculator.yaml"
    config.write_text(
        f"""
include: {Path("configs/demo.yaml").resolve()}
model: {{path: {taught}}}
data: {{train: [{{path: {data}, verifier: exact}}], eval: []}}
rollout: {{sampling: {{environment: calculator, max_response_tokens: 16, max_context_tokens: 128}}}}
algorithm: {{objective: grpo, search_traces: 8, entropy_bonus: 1.0e-4}}  # so that every trace is trained on
"""
    )
    run = TrainingRun(
        tmp_path / "run", "run.steps=3", "batch.dynamic_sampling=false", ranks=1, config=str(config)
    ).finish()  # fmt: skip
    rows = [row for path in (run.folder / "traces").glob("*.parquet") for row in read_traces(path)]
    traces = [trace for row in rows for trace in row["traces"]]
    assert sum(bool(trace["observation_spans"]) for trace in traces) > 0.5 * len(traces)
    for trace in traces:
        observed = sum(stop - start for start, stop in trace["observation_spans"])
        assert trace["length"] == len(trace["response_ids"]) - observed
    for step in run.metrics():
        assert step["reward/search"] > 0.5
        assert step["sampler/log_ratio_abs_max"] < 1e-4
        assert step["train/tokens"] == step["rollout/response_tokens"]
    assert sum(step["rollout/response_tokens"] for step in run.metrics()) == sum(
        trace["length"] for trace in traces
    )
