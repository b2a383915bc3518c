"""The plan puts every sequence in one place, within the budget, evenly, and the same on every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiral_mega.packing.balance import ATTENTION_TOKENS, plan_microbatches
from spiral_mega.packing.sequences import Sequence
from tests.support.ranks import run_ranks

LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=80)
WORLDS = st.integers(1, 9)


def budget_for(lengths: list[int], spare: int) -> int:
    return max(lengths) + spare


@given(LENGTHS, st.integers(0, 8000), WORLDS)
def test_every_sequence_is_in_exactly_one_micro_batch(lengths: list[int], spare: int, world_size: int) -> None:
    plan = plan_microbatches(lengths, budget_for(lengths, spare), world_size)
    assert sorted(i for rank in plan for members in rank for i in members) == list(range(len(lengths)))


@given(LENGTHS, st.integers(0, 8000), WORLDS)
def test_no_micro_batch_exceeds_the_budget(lengths: list[int], spare: int, world_size: int) -> None:
    budget = budget_for(lengths, spare)
    plan = plan_microbatches(lengths, budget, world_size)
    assert all(sum(lengths[i] for i in members) <= budget for rank in plan for members in rank)


@given(LENGTHS, st.integers(0, 8000), WORLDS)
def test_every_rank_has_as_many_micro_batches_and_few_of_them(lengths: list[int], spare: int, world_size: int) -> None:
    budget = budget_for(lengths, spare)
    plan = plan_microbatches(lengths, budget, world_size)
    assert len(plan) == world_size
    (rounds,) = {len(rank) for rank in plan}
    least = -(-sum(lengths) // (budget * world_size))
    # Had one round fewer failed, every micro-batch of it would have been over half full.
    assert least <= rounds <= 2 * least


@given(LENGTHS, st.integers(0, 8000), WORLDS)
def test_ranks_have_about_the_same_work_at_any_time_and_in_total(
    lengths: list[int], spare: int, world_size: int
) -> None:
    budget = budget_for(lengths, spare)
    plan = plan_microbatches(lengths, budget, world_size)

    def cost(members: list[int]) -> float:
        return sum(lengths[i] + lengths[i] ** 2 / ATTENTION_TOKENS for i in members)

    # A micro-batch dearer than another holds a last sequence that found the other dearer still, or without room.
    bound = max(lengths) * (1 + budget / ATTENTION_TOKENS) + 1e-6
    for at_once in zip(*plan, strict=True):
        assert max(map(cost, at_once)) - min(map(cost, at_once)) <= bound
    totals = [sum(map(cost, rank)) for rank in plan]
    assert max(totals) - min(totals) <= bound


@given(LENGTHS, WORLDS)
def test_a_sequence_over_the_budget_is_an_error_that_says_what_to_raise(lengths: list[int], world_size: int) -> None:
    longest = max(lengths)
    with pytest.raises(
        ValueError, match=rf"{longest} tokens exceeds policy\.microbatch_tokens \({longest - 1}\): raise"
    ):
        plan_microbatches(lengths, longest - 1, world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_nothing_to_plan_is_no_micro_batch(world_size: int) -> None:
    assert plan_microbatches([], 100, world_size) == [[] for _ in range(world_size)]


def test_fewer_sequences_than_ranks_leave_empty_micro_batches() -> None:
    plan = plan_microbatches([5, 7], 10, 4)
    assert sorted(plan) == [[[]], [[]], [[0]], [[1]]]


def test_equal_sequences_are_dealt_out_evenly() -> None:
    plan = plan_microbatches([10] * 24, 60, 4)
    assert [[len(members) for members in rank] for rank in plan] == [[6]] * 4


def sequences() -> list[Sequence]:
    return [
        Sequence(
            key=(100 - i // 4, i % 4),
            prompt_ids=list(range(1 + i % 5)),
            response_ids=[i] * (1 + (i * i) % 17),
            sampler_logprobs=[-0.5 * i] * (1 + (i * i) % 17),
            advantage=i / 7,
            weight=1 / (1 + i),
        )
        for i in range(22)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sequences_arrive_whole_and_where_the_plan_wants_them_whoever_owned_them(world_size: int) -> None:
    ownerships = {"all on rank 0": 0, "one shuffle": 1, "another": 2}
    arguments = [(sequences(), 60, seed) for seed in ownerships.values()] + [(sequences()[:1], 60, 1), ([], 60, 1)]
    by_rank = run_ranks(world_size, "tests.packing.workers:distribute_all", arguments)
    *shuffled, single, nothing = zip(*by_rank, strict=True)
    for parts in shuffled:
        assert list(parts) == list(shuffled[0])
    arrived = [sequence for rank in shuffled[0] for members in rank for sequence in members]
    assert sorted(arrived, key=lambda s: s.key) == sorted(sequences(), key=lambda s: s.key)
    assert all(sum(s.num_tokens for s in members) <= 60 for rank in shuffled[0] for members in rank)
    assert sorted(map(len, single)) == [1] * world_size
    assert [s for rank in single for members in rank for s in members] == sequences()[:1]
    assert list(nothing) == [[]] * world_size
