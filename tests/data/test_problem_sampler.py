"""Every epoch holds every problem once, in an order that resumes exactly, on any number of ranks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiral_mega.data.sampler import ProblemSampler
from spiral_mega.errors import DataError

sizes = st.integers(1, 40)


@given(sizes, st.integers(0, 2**31), st.lists(st.integers(0, 60), max_size=8))
def test_each_epoch_is_a_permutation_however_the_draws_are_cut(num_problems, seed, counts):
    sampler = ProblemSampler(num_problems, seed)
    stream = [index for count in counts for index in sampler.next(count)]
    assert len(stream) == sum(counts) == sampler.drawn
    assert stream == ProblemSampler(num_problems, seed).next(sum(counts))
    for start in range(0, len(stream) - num_problems + 1, num_problems):
        assert sorted(stream[start : start + num_problems]) == list(range(num_problems))


@given(sizes, st.integers(0, 100), st.integers(0, 100))
def test_resuming_goes_on_as_if_never_stopped(num_problems, before, after):
    whole = ProblemSampler(num_problems, seed=3)
    expected = whole.next(before + after)[before:]
    stopped = ProblemSampler(num_problems, seed=3)
    stopped.next(before)
    resumed = ProblemSampler(num_problems, seed=3)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert resumed.next(after) == expected
    assert resumed.epoch == whole.epoch


@pytest.mark.parametrize(("world_before", "world_after"), [(1, 4), (4, 1), (2, 3)])
def test_another_world_size_resumes_with_the_same_batches(world_before, world_after):
    def step(samplers: list[ProblemSampler]) -> list[int]:
        world = len(samplers)
        slices = [sampler.next(12)[rank::world] for rank, sampler in enumerate(samplers)]
        return sorted(index for part in slices for index in part)

    one = [ProblemSampler(50, seed=1)]
    expected = [step(one) for _ in range(10)]
    ranks = [ProblemSampler(50, seed=1) for _ in range(world_before)]
    batches = [step(ranks) for _ in range(5)]
    state = ranks[0].state_dict()
    assert all(rank.state_dict() == state for rank in ranks)
    ranks = [ProblemSampler(50, seed=1) for _ in range(world_after)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert batches + [step(ranks) for _ in range(5)] == expected


def test_epochs_and_seeds_have_orders_of_their_own():
    sampler = ProblemSampler(100, seed=0)
    first, second = sampler.next(100), sampler.next(100)
    assert first != second
    assert first != ProblemSampler(100, seed=1).next(100)
    assert first != list(range(100))


def test_the_order_is_pinned_so_that_old_checkpoints_resume():
    assert ProblemSampler(10, seed=7).next(13) == [2, 3, 1, 4, 9, 6, 5, 7, 0, 8, 8, 3, 2]


def test_epoch_counts_passes_as_a_fraction():
    sampler = ProblemSampler(8, seed=0)
    assert sampler.epoch == 0.0
    sampler.next(12)
    assert sampler.epoch == 1.5


def test_a_state_of_other_data_or_another_seed_is_refused():
    state = ProblemSampler(8, seed=0).state_dict()
    with pytest.raises(
        DataError, match="ran over 8 problems, this one over 9: resume with the same data"
    ):
        ProblemSampler(9, seed=0).load_state_dict(state)
    with pytest.raises(DataError, match=r"has seed 0, this one 5: resume with the same run\.seed"):
        ProblemSampler(8, seed=5).load_state_dict(state)
    with pytest.raises(DataError, match="wrong checkpoint"):
        ProblemSampler(8, seed=0).load_state_dict({"step": 3})
    with pytest.raises(DataError, match="at least one problem"):
        ProblemSampler(0, seed=0)
    with pytest.raises(DataError, match="negative"):
        ProblemSampler(1, seed=0).next(-1)
