"""What each harness samples and measures, against numbers counted by hand."""

import numpy as np
import pytest

from spiral_mega.algorithm.sampling_plan import Level, SamplingPlan
from spiral_mega.errors import ConfigError
from spiral_mega.evaluation.chunked_sampling import plan_samplings
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.harnesses.registry import HARNESSES, read_harnesses
from tests.rollout.scripted import settings

LONGEST = 8


def harness(**values):
    (found,) = read_harnesses([values])
    return found


def graded(rewards, groups=None, lengths=None, **more):
    """Prompts of 10 tokens, 4 of them cached; responses of 5 unless `lengths` says otherwise."""
    count = len(rewards)
    tokens = {"prompt": [10] * count, "generated": lengths or [5] * count, "cached": [4] * count}
    return GradedEpisode("p", rewards, groups or [0] * count, tokens, **more)


def measures(of, *records):
    return of.sampling_plan(LONGEST), of.measure(list(records), LONGEST)


def test_pass_at_k_reports_powers_of_two_and_the_tokens_that_k_responses_cost():
    of = harness(kind="pass_at_k", samples=6)
    plan, found = measures(
        of, graded([1, 0, 0, 0, 0, 0]), graded([0.9] * 6, lengths=[1, 2, 3, 4, 5, 9])
    )
    assert plan == SamplingPlan(6)
    assert [each.x for each in found] == [1, 2, 4, 6]
    assert [each.values for each in found] == [[pytest.approx(k / 6), 0.0] for k in (1, 2, 4, 6)]
    assert found[1].tokens == pytest.approx(
        {"prompt": 20.0, "generated": (10 + 8) / 2, "cached": 8.0}
    )
    assert found[1].budget == 2 * LONGEST
    assert found[1].mean == pytest.approx(1 / 6)


def test_majority_counts_answers_and_best_of_n_takes_part_of_a_reward():
    record = graded([0, 0, 1, 0.5], groups=[1, 1, 2, 3])
    _, found = measures(harness(kind="majority", samples=4, ks=[4, 1]), record)
    assert [(each.x, each.values) for each in found] == [(1, [pytest.approx(1.5 / 4)]), (4, [0.0])]
    _, found = measures(harness(kind="best_of_n", samples=4, ks=[3]), graded([0, 0, 0.5, 0.25]))
    assert found[0].values == [pytest.approx((3 * 0.5 + 0.25) / 4)]


def test_sequential_reads_rewards_at_each_budget_and_counts_no_token_past_it():
    of = harness(kind="sequential", samples=2, budgets=[8, 2])
    truncated = {"2": [0.0, 1.0], "8": [1.0, 1.0]}
    plan, found = measures(of, graded([1, 1], lengths=[7, 1], truncated_rewards=truncated))
    assert plan == SamplingPlan(2, max_tokens=8)
    assert [(each.x, each.values, each.tokens["generated"]) for each in found] == [
        (2, [0.5], 1.5),
        (8, [1.0], 4.0),
    ]
    assert harness(kind="sequential").token_budgets(100) == [13, 25, 50, 100]


def test_rsa_reads_each_population_by_itself_and_adds_up_what_it_took_to_get_there():
    of = harness(kind="rsa", population=3, set_size=2, steps=2)
    rewards, groups = [1, 0, 0, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 1, 2, 3, 4]
    plan, found = measures(of, graded(rewards, groups))
    assert plan == SamplingPlan(3, levels=(Level(3, 2, "independent"),) * 2)
    values = {(each.x, each.metric): each.values[0] for each in found}
    assert values == {
        (0, "mean"): pytest.approx(1 / 3), (0, "majority"): 0.0, (0, "best"): 1.0,
        (1, "mean"): pytest.approx(2 / 3), (1, "majority"): 1.0, (1, "best"): 1.0,
        (2, "mean"): 0.0, (2, "majority"): 0.0, (2, "best"): 0.0,
    }  # fmt: skip
    last = found[-1]
    assert last.tokens == {"prompt": 90.0, "generated": 45.0, "cached": 36.0}
    assert last.budget == 9 * LONGEST


def test_a_pipeline_is_its_stages_and_is_read_at_the_end():
    stages = [
        {"search": 4, "tokens": 3},
        {"aggregate": 2, "set_size": 3, "tokens": 5},
        {"aggregate": 1, "set_size": 2},
    ]
    of = harness(kind="pipeline", name="mine", stages=stages, reducer="best")
    plan, (found,) = measures(of, graded([1, 1, 1, 1, 0, 0, 0.5]))
    assert plan == SamplingPlan(
        4, levels=(Level(2, 3, "independent", 5), Level(1, 2, "independent")), max_tokens=3
    )
    assert (found.harness, found.values, found.budget) == ("mine", [0.5], 4 * 3 + 2 * 5 + LONGEST)
    specs = plan.draw_sets(np.random.default_rng(0))
    assert [plan.max_tokens, *(spec.max_tokens for spec in specs)] == [3, 5, 5, None]
    assert [(spec.level, spec.component) for spec in specs] == [(0, "aggregation")] * 2 + [
        (1, "aggregation_2")
    ]


def test_each_set_is_drawn_without_replacement_from_the_level_before_and_all_are_equally_likely():
    plan = SamplingPlan(
        4, aggregation_traces=2, levels=(Level(3, 2, "independent"), Level(2, 3, "independent"))
    )
    rng = np.random.default_rng(0)
    drawn = [[spec.members for spec in plan.draw_sets(rng)] for _ in range(3000)]
    for sets in drawn:
        assert [len(members) for members in sets] == [2, 2, 2, 3, 3]
        assert all(len(set(members)) == len(members) for members in sets)
        assert all(set(members) <= set(range(4)) for members in sets[:3])
        assert all(set(members) <= set(range(4, 10)) for members in sets[3:])
    for position in range(3):
        counts = np.unique([sets[position] for sets in drawn], axis=0, return_counts=True)[1]
        assert len(counts) == 12, "ordered pairs of four"
        assert ((counts - 250) ** 2 / 250).sum() < 31.3, (
            "chi-square with 11 degrees of freedom, 0.1 %"
        )
    pairs = {(sets[0], sets[1]) for sets in drawn}
    assert len(pairs) == 144, "children draw independently, and may draw alike"


def test_harnesses_with_one_plan_share_its_samples():
    same = [
        {"kind": "pass_at_k", "samples": 4},
        {"kind": "majority", "samples": 4},
        {"kind": "best_of_n", "samples": 8},
    ]
    config = settings(eval={"harnesses": same})
    found = plan_samplings(config)
    assert [(each.name, len(each.harnesses)) for each in found] == [("search4", 2), ("search8", 1)]
    names = [
        SamplingPlan(8, levels=(Level(8, 4, "independent"),) * 2),
        SamplingPlan(8, levels=(Level(8, 4, "independent", 16),) * 2, max_tokens=4),
    ]
    assert len({*names}) == 2


def test_budgets_are_not_read_off_traces_of_several_turns():
    harnesses = [{"kind": "sequential"}]
    config = settings(eval={"harnesses": harnesses}, rollout={"sampling.environment": "calculator"})
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.environment is 'calculator'"):
        plan_samplings(config)


@pytest.mark.parametrize(
    ("harnesses", "message"),
    [
        ([{"kind": "rsa"}, {"kind": "rsa", "steps": 2}], "several are called 'rsa'"),
        (
            [{"kind": "rsa", "population": 8, "set_size": 8}],
            "rsa: a set of 8 may come to 88 tokens",
        ),
        ([{"kind": "sequential", "budgets": [4, 70]}], "a response may come to 86 tokens"),
    ],
)
def test_what_cannot_be_sampled_is_refused_with_the_numbers(harnesses, message):
    config = settings(
        eval={"harnesses": harnesses},
        rollout={"sampling.max_response_tokens": 8, "sampling.max_context_tokens": 80},
    )
    with pytest.raises(ConfigError, match=message):
        plan_samplings(config)


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "rsa", "population": 2, "set_size": 3},
        {"kind": "pass_at_k", "samples": 4, "ks": [8]},
        {"kind": "pipeline", "name": "x", "stages": [{"aggregate": 2, "set_size": 1}]},
        {"kind": "pipeline", "name": "x", "stages": [{"search": 2}, {"search": 2}]},
        {
            "kind": "pipeline",
            "name": "x",
            "stages": [{"search": 2}, {"aggregate": 4, "set_size": 3}],
        },
        {"kind": "pipeline", "stages": [{"search": 2}]},
        {"kind": "rsa", "stepz": 3},
        {"kind": "vote"},
    ],
)
def test_a_harness_that_makes_no_sense_is_refused(values):
    with pytest.raises(ValueError, match=r"\w"):
        harness(**values)


def test_a_harness_is_registered_under_its_own_kind():
    assert {kind: harness.model_fields["kind"].default for kind, harness in HARNESSES.items()} == {
        kind: kind
        for kind in ("pass_at_k", "majority", "best_of_n", "sequential", "rsa", "pipeline")
    }
