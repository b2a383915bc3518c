import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from benchmarks.rollout_schedule.bounds import lower_bound
from benchmarks.rollout_schedule.report import compare, plot, table
from spiral_mega.simulation.schedule import POLICIES, SimPolicy, simulate
from spiral_mega.simulation.sim_engine import Engine, SimSequence
from spiral_mega.simulation.workload import (
    QWEN3_4B,
    QWEN3_8B,
    EngineModel,
    Lengths,
    Shape,
    SimProblem,
    engine_model,
    sample_problems,
)

MODEL = EngineModel(
    step=3.0, sequence=0.2, kv=0.01, prefill=0.05, pair=0.001, capacity=1e6, chunk=16.0
)
SHAPE = Shape(problems=6, max_tokens=60)
LENGTHS = Lengths(median=20.0, prompt_low=5, prompt_high=20)
COMPLETE = [policy for policy in POLICIES if not policy.extra]
policies = pytest.mark.parametrize("policy", COMPLETE, ids=lambda policy: policy.name)


def run_engine(model: EngineModel, sequences: list[SimSequence]) -> Engine:
    engine = Engine(model)
    for sequence in sequences:
        engine.add(sequence)
    ended: list[SimSequence] = []
    while (time := engine.next_event()) < math.inf:
        ended += engine.advance(time)
        assert engine.peak <= model.capacity + 1e-6
    assert sorted(s.key for s in ended) == sorted(s.key for s in sequences)
    return engine


def total_tokens(problems: list[SimProblem]) -> int:
    return sum(sum(problem.lengths()) for problem in problems)


def test_one_trace_takes_its_prefill_and_its_steps() -> None:
    engine = run_engine(MODEL, [SimSequence(("only",), 30, [("prompt", 40)])])
    prefill = 40 / 16 * 3.0 + 0.05 * 40 + 0.001 * 40 * 20
    decode = 30 * (3.0 + 0.2 + 0.01 * 40) + 0.01 * 30 * 30 / 2
    assert engine.now == pytest.approx(prefill + decode) == MODEL.latency(0, 40, 30)
    assert engine.decoded == pytest.approx(30)


def test_traces_of_one_prompt_share_its_prefill_and_each_reads_it() -> None:
    engine = run_engine(MODEL, [SimSequence((i,), 30, [("prompt", 40)]) for i in range(2)])
    prefill = 40 / 16 * 3.0 + 0.05 * 40 + 0.001 * 40 * 20
    assert engine.now == pytest.approx(
        prefill + 30 * 3.0 + 2 * (30 * (0.2 + 0.01 * 40) + 0.01 * 30 * 30 / 2)
    )
    assert engine.peak == pytest.approx(40 + 2 * 30)


def test_a_second_prompt_is_prefilled_while_the_first_decodes() -> None:
    engine = run_engine(MODEL, [SimSequence((i,), 30, [(i, 40)]) for i in range(2)])
    work = 2 * (MODEL.prefill_time(0, 40) + MODEL.decode(40, 30))
    steps = 40 / 16 + 40 / 16 + 30  # the second starts decoding when both are prefilled
    assert engine.now == pytest.approx(work + 3.0 * steps)


def test_only_the_parts_that_differ_are_prefilled_and_stored() -> None:
    engine = Engine(MODEL)
    engine.add(SimSequence(("a",), 30, [("x", 10), ("xa", 20)]))
    engine.add(SimSequence(("b",), 30, [("x", 10), ("xb", 5)]))
    assert engine.stored == 35


def test_a_full_cache_makes_the_last_give_way_and_nothing_is_lost() -> None:
    model = replace(MODEL, capacity=200.0)
    engine = run_engine(model, [SimSequence((i,), 60, [(i, 20)]) for i in range(8)])
    assert engine.preemptions > 0
    assert engine.decoded == pytest.approx(8 * 60)


def test_a_trace_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="never fit the cache"):
        Engine(replace(MODEL, capacity=50.0)).add(SimSequence(("big",), 40, [("prompt", 20)]))


@policies
def test_a_lone_chain_takes_the_critical_path(policy: SimPolicy) -> None:
    problem = SimProblem(prompt=12, search=(30,), sets=((0,),), aggregation=((25,),))
    outcome = simulate(policy, [problem], MODEL, engines=2, want=1)
    expected = MODEL.latency(0, 12, 30) + MODEL.latency(0, 12 + 30, 25)
    assert outcome.makespan == pytest.approx(expected)
    # The bound cannot know that the problem's own tokens are prefilled again for the set.
    assert lower_bound([problem], MODEL, 2).makespan == pytest.approx(
        MODEL.latency(0, 12, 30) + MODEL.latency(12, 30, 25), rel=1e-5
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    engines=st.integers(1, 9),
    problems=st.integers(1, 8),
    capacity=st.sampled_from([600.0, 1500.0, 1e6]),
    max_sequences=st.sampled_from([3, 20, 256]),
    step=st.sampled_from([0.1, 3.0, 30.0]),
)
@example(
    seed=61, engines=1, problems=1, capacity=600.0, max_sequences=3, step=0.1
)  # a trace in no set ends last
@example(
    seed=5, engines=9, problems=5, capacity=1500.0, max_sequences=3, step=0.1
)  # the last ends in a move
def test_every_token_is_written_once_within_the_cache_and_not_below_the_bound(
    seed: int, engines: int, problems: int, capacity: float, max_sequences: int, step: float
) -> None:
    model = replace(MODEL, capacity=capacity, max_sequences=max_sequences, step=step)
    batch = sample_problems(replace(SHAPE, problems=problems), LENGTHS, seed)
    bound = lower_bound(batch, model, engines)
    for policy in COMPLETE:
        outcome = simulate(policy, batch, model, engines, want=problems)
        assert outcome.decoded == pytest.approx(total_tokens(batch))
        assert outcome.ended == sum(1 for problem in batch for _ in problem.lengths())
        assert outcome.kept == tuple(range(problems))
        assert outcome.peak_cache <= capacity + 1e-6
        assert outcome.busy <= engines * outcome.makespan * (1 + 1e-9)
        assert outcome.makespan >= bound.makespan * (1 - 1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), engines=st.integers(1, 4))
def test_waiting_for_more_never_helps_when_prefill_is_free(seed: int, engines: int) -> None:
    model = replace(MODEL, prefill=0.0, pair=0.0, chunk=1e12)
    batch = sample_problems(SHAPE, LENGTHS, seed)
    streaming, rank, step = (
        simulate(SimPolicy(barrier, barrier=barrier), batch, model, engines, want=6).makespan
        for barrier in ("none", "engine", "step")
    )
    assert streaming <= rank * (1 + 1e-9)
    assert rank <= step * (1 + 1e-9)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_seed_fixes_the_outcome(policy: SimPolicy) -> None:
    first, again, other = (
        simulate(policy, sample_problems(SHAPE, LENGTHS, seed, extra=2), MODEL, 3, want=6)
        for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_extra_problems_leave_the_first_ones_as_they_are() -> None:
    assert sample_problems(SHAPE, LENGTHS, 3, extra=4)[:6] == sample_problems(SHAPE, LENGTHS, 3)


def test_the_step_ends_when_enough_problems_are_complete() -> None:
    batch = sample_problems(SHAPE, LENGTHS, 0, extra=3)
    outcome = simulate(POLICIES[-1], batch, MODEL, 3, want=6)
    assert len(outcome.kept) == 6
    assert outcome.decoded > total_tokens(
        [batch[i] for i in outcome.kept]
    )  # what was given up was paid for


def test_routed_sets_use_engines_that_hold_no_problem() -> None:
    batch = sample_problems(SHAPE, LENGTHS, 0)
    static, routed = (
        simulate(policy, batch, MODEL, engines=12, want=6)
        for policy in (SimPolicy("a"), SimPolicy("b", route=True))
    )
    assert routed.busy > 0
    assert routed.makespan < static.makespan


def test_lengths_are_cut_at_the_limit_and_alike_within_a_problem() -> None:
    batch = sample_problems(Shape(), Lengths(), 0)
    logs = np.log([list(problem.search) for problem in batch])
    assert logs.mean(axis=1).std() > 0.3
    lengths = np.array([length for problem in batch for length in problem.lengths()])
    assert lengths.max() == 4096
    assert 0.05 < (lengths == 4096).mean() < 0.15


def test_constants_scale_as_the_hardware_does() -> None:
    small, large = engine_model(QWEN3_4B), engine_model(QWEN3_8B)
    assert small.step < large.step
    assert small.kv == large.kv  # the two hold the same keys and values
    assert small.capacity > large.capacity
    halved = engine_model(QWEN3_8B, tensor_parallel=2)
    assert halved.kv == pytest.approx(large.kv / 2)
    assert large.step / 2 < halved.step < large.step


def test_report_has_a_row_for_each_schedule_and_size(tmp_path: Path) -> None:
    rows = list(compare([2, 4], 2, MODEL, SHAPE, LENGTHS))
    assert len(rows) == 2 * len(POLICIES)
    assert all(row.over_bound >= 1 for row in rows if "extra" not in row.schedule)
    assert len(table(rows).splitlines()) == 2 + len(rows)
    plot(rows, 2, "small", tmp_path / "schedules.png")
    assert imread(tmp_path / "schedules.png").std() > 0.01
    with pytest.raises(ValueError, match="engines of 2"):
        list(compare([3], 1, MODEL, SHAPE, LENGTHS, tensor_parallel=2))
