"""Dynamic sampling keeps the first effective prompts, the same ones on any number of ranks, within its bound."""

from collections import Counter

import pytest

from spiral_mega.config import AlgorithmConfig
from spiral_mega.data.sampler import ProblemSampler
from spiral_mega.rollout.pipeline import Interrupted
from tests.rollout.launches import CASES, STEPS, of_ranks
from tests.rollout.rank_jobs import CREDIT, collect, collector_of
from tests.rollout.scripted import ScriptedPipeline

IN_ORDER = [name for name, (_, _, batch) in CASES.items() if batch.get("keep") != "fastest"]
DYNAMIC = [name for name, (_, _, batch) in CASES.items() if batch.get("dynamic_sampling", True)]


@pytest.fixture(scope="module")
def by_world(runtime):
    """{world size: {case: [rank][step]}}"""
    alone = {case: [collect(runtime, *arguments, STEPS)] for case, arguments in CASES.items()}
    return {1: alone} | {world: {case: of_ranks(world, case) for case in CASES} for world in (2, 4)}


@pytest.fixture(params=[1, 2, 4])
def world(request):
    return request.param


def prompts_of(case: str, step_ends: list[int]) -> list[list[tuple[str, tuple, bool]]]:
    """By step, every prompt up to the sampler's position after it: (problem, seed parts, effective), one at a time."""
    count, share, _ = CASES[case]
    sampler, pipeline = ProblemSampler(count, seed=3), ScriptedPipeline(share, AlgorithmConfig())
    steps = []
    for step, end in enumerate(step_ends):
        seen: Counter[str] = Counter()
        steps.append([])
        while sampler.drawn < end:
            name = f"p{sampler.next(1)[0]}"
            parts = (11, step, name, seen[name])
            seen[name] += 1
            steps[-1].append((name, parts, pipeline.effective(parts)))
    return steps


@pytest.mark.parametrize("case", IN_ORDER)
def test_the_first_effective_prompts_are_kept_and_no_others(by_world, world, case):
    ranks = by_world[world][case]
    batch = CASES[case][2]
    steps = prompts_of(case, [each["drawn"] for each in ranks[0]])
    for step, prompts in enumerate(steps):
        effective = [i for i, (_, _, flag) in enumerate(prompts) if flag]
        wanted = (
            effective[: batch["problems"]]
            if batch.get("dynamic_sampling", True)
            else list(range(len(prompts)))
        )
        for rank in ranks:
            got = rank[step]["batch"]
            assert got.kept_indices == wanted
            assert (got.num_prompts, got.num_effective) == (len(prompts), len(effective))
        kept = sorted((e.index, e.problem.id) for rank in ranks for e in rank[step]["batch"].kept)
        assert kept == [(i, prompts[i][0]) for i in wanted], "each on one rank"
        sampled = sorted(
            (e.index, e.problem.id) for rank in ranks for e in rank[step]["batch"].sampled
        )
        assert sampled == [(i, name) for i, (name, _, _) in enumerate(prompts)]


@pytest.mark.parametrize("case", DYNAMIC)
def test_prompts_are_added_while_problems_are_missing_up_to_the_bound(by_world, world, case):
    batch = CASES[case][2]
    bound = batch["problems"] * (1 + batch.get("max_resample_rounds", 4))
    for step in range(STEPS):
        got = by_world[world][case][0][step]
        drawn = got["batch"].num_prompts + got["batch"].num_cancelled
        assert drawn == sum(len(rank[step]["calls"]) for rank in by_world[world][case])
        assert len(got["batch"].kept_indices) == batch["problems"] or drawn == bound
        assert drawn <= bound
        assert got["in_progress"][0] == min(bound, batch["problems"] * batch.get("oversample", 1))


@pytest.mark.parametrize("case", ["half_effective", "oversampled"])
def test_no_rank_waits_for_a_round_to_end(by_world, world, case):
    """What proved ineffective is replaced at once: more is in progress than is missing, as long as the bound allows."""
    for rank in by_world[world][case]:
        for step in rank:
            assert step["in_progress"][1] >= step["in_progress"][0] / 2


def test_the_fastest_fill_the_batch_whatever_was_started_before_them(by_world, world):
    gaps = 0
    for rank in by_world[world]["fastest"]:
        for step in rank:
            kept = step["batch"].kept_indices
            assert len(kept) == 8
            gaps += step["batch"].num_cancelled > 0 and max(kept) >= step["batch"].num_prompts
    assert gaps > 0


@pytest.mark.parametrize("case", IN_ORDER)
def test_the_number_of_ranks_changes_nothing_but_who_samples(by_world, case):
    def whole(world):
        ranks = by_world[world][case]
        return [
            {
                "episodes": sorted(
                    (episode for rank in ranks for episode in rank[step]["batch"].sampled),
                    key=lambda each: each.index,
                ),
                "kept": ranks[0][step]["batch"].kept_indices,
                "prompts": ranks[0][step]["batch"].num_prompts,
                "drawn": ranks[0][step]["drawn"],
            }
            for step in range(STEPS)
        ]

    assert whole(1) == whole(2) == whole(4)


@pytest.mark.parametrize("case", IN_ORDER)
def test_metrics_are_the_same_on_every_rank_of_every_world(by_world, case):
    """Except for how many prompts were cancelled, which depends on the order in which episodes finished."""
    for step in range(STEPS):
        alone = by_world[1][case][0][step]["metrics"]
        for world in (2, 4):
            for rank in by_world[world][case]:
                assert rank[step]["metrics"] | {"batch/prompts_cancelled": 0.0} == pytest.approx(
                    alone | {"batch/prompts_cancelled": 0.0}
                )


@pytest.mark.parametrize("case", CASES)
def test_no_two_prompts_of_a_run_have_the_same_seed(by_world, world, case):
    """Also of one problem that comes twice in a step, as it does at the seam of two epochs."""
    parts = [p for rank in by_world[world][case] for step in rank for p in step["calls"]]
    assert len(set(parts)) == len(parts)
    if case == "fewer_problems_than_prompts":
        assert max(occurrence for *_, occurrence in parts) >= 2


def test_a_batch_without_an_effective_problem_is_empty_and_the_next_one_continues(by_world, world):
    for rank in by_world[world]["nothing_effective"]:
        for step in rank:
            batch = step["batch"]
            assert (batch.kept, batch.kept_indices, batch.num_effective, batch.num_prompts) == (
                [],
                [],
                0,
                12,
            )
            assert step["metrics"]["batch/effective_share"] == 0
        assert [step["drawn"] for step in rank] == [12, 24, 36]


def test_a_rank_without_a_problem_takes_part_all_the_same(by_world):
    ranks = by_world[4]["one_problem_a_step"]
    assert any(not rank[step]["batch"].sampled for rank in ranks for step in range(STEPS))
    assert all(len(ranks[0][step]["batch"].kept_indices) == 1 for step in range(STEPS))


def test_an_interrupted_step_is_sampled_again_the_same_from_the_state_before_it(runtime):
    arguments = CASES["half_effective"]
    expected = collector_of(runtime, *arguments).collect(0, CREDIT)
    collector = collector_of(runtime, *arguments)
    plain_stream = collector.pipeline.stream

    def interrupted(source):
        source.next({})
        source.next({0: False, 1: False})
        raise Interrupted

    before = collector.sampler.state_dict()
    collector.pipeline.stream = interrupted
    with pytest.raises(Interrupted):
        collector.collect(0, CREDIT)
    assert collector.sampler.drawn > before["drawn"]
    collector.pipeline.stream = plain_stream
    collector.sampler.load_state_dict(before)
    assert collector.collect(0, CREDIT) == expected
