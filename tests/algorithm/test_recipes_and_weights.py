"""What each objective writes on the traces, and the weights that turn token losses into the batch's loss."""

from fractions import Fraction

import pytest

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.algorithm.sets import gradient_scale
from spiral_mega.algorithm.weighting import (
    ComponentTotals,
    component_totals,
    make_weighting,
    training_sequences,
)
from spiral_mega.config.model_set import DEFAULT_MODEL
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, Problem, Trace


def trace(component, index, length, reward, set_index=None):
    ids = list(range(length))
    return Trace(
        component, index, [1], ids, [-1.0] * length, "stop", "", set_index=set_index, reward=reward
    )


def episode(search, sets=(), rewards=(), lengths=None, name="p", index=0):
    """`search` and `lengths` are lengths, `rewards` the aggregation rewards by set. Search rewards are a trap."""
    lengths = lengths or [[3] * len(row) for row in rewards]
    return Episode(
        Problem(name, (), ("1",), "exact"),
        0,
        [trace(SEARCH, i, length, reward=1000.0 * i) for i, length in enumerate(search)],
        list(sets),
        [
            [trace(AGGREGATION, i, lengths[k][i], reward, k) for i, reward in enumerate(row)]
            for k, row in enumerate(rewards)
        ],
        index=index,
    )


def algorithm(**changes):
    return AlgorithmConfig(
        **{
            "search_traces": 3,
            "set_size": 2,
            "num_sets": 2,
            "aggregation_traces": 2,
            "target_length": 4,
            **changes,
        }
    )


def test_spiral_credits_search_by_sets_and_aggregation_by_reward_and_gates_each_by_its_length():
    # f = (1, 0.5), baseline 0.75: sets at +0.25 and -0.25; trace 0 is in the first, 1 in both, 2 in the second.
    one = episode([5, 5, 5], [(0, 1), (1, 2)], [[1.5, 0.5], [1.0, 0.0]], lengths=[[9, 9], [4, 9]])
    make_objective(algorithm()).assign_credit(one)
    assert [(t.advantage, t.gated) for t in one.search] == [
        (0.0, True),
        (0.0, False),
        (-0.25, False),
    ]
    assert [[(t.advantage, t.gated) for t in group] for group in one.aggregation] == [
        [(0.0, True), (-0.5, False)],
        [(0.5, False), (-0.5, False)],
    ]
    ungated = episode(
        [5, 5, 5], [(0, 1), (1, 2)], [[1.0, 1.0], [1.0, 0.0]], lengths=[[9, 9], [9, 9]]
    )
    make_objective(algorithm(target_length=None)).assign_credit(ungated)
    assert [t.advantage for t in ungated.search] == [0.25, 0.0, -0.25]
    assert ungated.aggregation[1][0].advantage == 0.5


def test_assigning_again_under_another_gate_replaces_what_was_written():
    one = episode([5, 5, 5], [(0, 1), (1, 2)], [[1.0, 1.0], [1.0, 0.0]])
    make_objective(algorithm()).assign_credit(one)
    make_objective(algorithm(target_length=None)).assign_credit(one)
    assert (one.search[0].advantage, one.search[0].gated) == (0.25, False)


def test_spiral_without_reward_differences_is_not_effective():
    one = episode([1, 1, 1], [(0, 1), (1, 2)], [[0.1, 0.1], [0.1, 0.1]])
    make_objective(algorithm()).assign_credit(one)
    assert not one.effective()


def test_spiral_refuses_an_episode_without_its_sets():
    for broken in (episode([1, 1]), episode([1, 1], [(0, 1)], [])):
        with pytest.raises(ValueError, match=r"problem p has \d sets and 0 groups"):
            make_objective(algorithm()).assign_credit(broken)


def test_grpo_credits_search_traces_by_their_own_rewards():
    one = episode([3, 5, 4])
    objective = make_objective(algorithm(objective="grpo"))
    for each, reward in zip(one.search, [0.0, 1.0, 0.5], strict=True):
        each.reward = reward
    objective.assign_credit(one)
    assert [(t.advantage, t.gated) for t in one.search] == [
        (-0.5, False),
        (0.0, True),
        (0.0, False),
    ]
    make_objective(
        algorithm(objective="grpo", target_length=None, options={"normalize_std": True})
    ).assign_credit(one)
    assert [t.advantage for t in one.search] == pytest.approx([-(1.5**0.5), 1.5**0.5, 0.0])
    assert (objective.plan.levels, objective.components) == ((), (SEARCH,))


@pytest.mark.parametrize("name", ["nonsense", "../spiral", "", "spiral.build", "__init__"])
def test_unknown_objectives_are_refused_with_the_known_ones(name):
    with pytest.raises(
        ValueError, match=r"algorithm.objective is .*: use one of aggregation_only, .*spiral"
    ):
        make_objective(algorithm(objective=name))


def batch():
    """Two problems: search lengths 1..6, aggregation lengths 7..14."""
    sets = [(0, 1), (1, 2)]
    return [
        episode([1, 2, 3], sets, [[1.0, 0.0], [1.0, 1.0]], [[7, 8], [9, 10]], "a"),
        episode([4, 5, 6], sets, [[1.0, 0.0], [0.0, 0.0]], [[11, 12], [13, 14]], "b", index=1),
    ]


def weigh(config, episodes=None):
    episodes = episodes or batch()
    objective = make_objective(config)
    totals = component_totals(episodes, objective.components)
    weighting = make_weighting(config, objective)
    return [(t, weighting.trace_weight(t, totals)) for e in episodes for t in e.traces()]


def sequences_of(episodes, models=(DEFAULT_MODEL,), *, include_ineffective=False, **changes):
    """The training sequences of episodes whose credit is assigned here, by model."""
    config = algorithm(**changes)
    objective = make_objective(config)
    for each in episodes:
        objective.assign_credit(each)
    totals = component_totals(episodes, objective.components)
    weighting = make_weighting(config, objective)
    return training_sequences(
        episodes, weighting, totals, models, include_ineffective=include_ineffective
    )


def test_effective_traces_become_sequences_with_their_credit_and_weight():
    episodes = batch()
    (sequences,) = sequences_of(episodes).values()
    traces = {
        (index, i): trace
        for index, each in enumerate(episodes)
        for i, trace in enumerate(each.traces())
    }
    effective = {key: trace for key, trace in traces.items() if trace.effective}
    assert 0 < len(effective) < len(traces)
    assert {tuple(each.key): (each.advantage, each.weight) for each in sequences} == {
        key: (trace.advantage, 1 / 2) for key, trace in effective.items()
    }
    for each in sequences:
        trace = effective[each.key]
        assert (each.prompt_ids, each.response_ids) == (trace.prompt_ids, trace.response_ids)
        assert each.sampler_logprobs == trace.logprobs


def test_regularizers_reach_traces_without_credit_but_not_empty_ones_or_other_components():
    episodes = batch()
    episodes[0].search[0].response_ids = []
    (every,) = sequences_of(episodes, include_ineffective=True).values()
    assert len(every) == 2 * (3 + 4) - 1
    (search,) = sequences_of(episodes, include_ineffective=True, objective="grpo").values()
    assert {each.key.position for each in search} == {0, 1, 2}


def test_each_model_gets_the_traces_that_it_wrote():
    by_model = sequences_of(batch(), (SEARCH, AGGREGATION), include_ineffective=True)
    assert {each.key.position for each in by_model[SEARCH]} == {0, 1, 2}
    assert {each.key.position for each in by_model[AGGREGATION]} == {3, 4, 5, 6}


def test_totals_count_problems_traces_and_tokens():
    assert component_totals(batch(), (SEARCH, AGGREGATION)) == {
        SEARCH: (2, 6, 21),
        AGGREGATION: (2, 8, 84),
    }
    assert component_totals([], (SEARCH, AGGREGATION)) == {
        SEARCH: (0, 0, 0),
        AGGREGATION: (0, 0, 0),
    }


def test_problems_count_for_a_component_that_they_have_no_trace_of():
    assert component_totals([episode([2, 2])], (SEARCH, AGGREGATION))[AGGREGATION] == (1, 0, 0)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum", lambda t: 1 / 2),
        ("token_mean", lambda t: 1 / (21 if t.component == SEARCH else 84)),
        ("sequence_mean", lambda t: 1 / ((6 if t.component == SEARCH else 8) * t.length)),
        (
            {SEARCH: "sum", AGGREGATION: "token_mean"},
            lambda t: 1 / 2 if t.component == SEARCH else 1 / 84,
        ),
    ],
)
def test_reductions_divide_by_their_own_count(reduction, expected):
    for each, weight in weigh(algorithm(loss_reduction=reduction)):
        assert weight == pytest.approx(expected(each), rel=1e-15)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_means_of_a_constant_loss_are_the_constant_in_each_component(reduction):
    config = algorithm(loss_reduction=reduction, component_weights={SEARCH: 3.0, AGGREGATION: 0.5})
    total = dict.fromkeys((SEARCH, AGGREGATION), 0.0)
    for each, weight in weigh(config):
        total[each.component] += weight * each.length
    assert total == pytest.approx({SEARCH: 3.0, AGGREGATION: 0.5})


@pytest.mark.parametrize("reduction", ["sum", "token_mean", "sequence_mean"])
def test_weights_do_not_depend_on_how_the_batch_lies_on_ranks(reduction):
    config = algorithm(loss_reduction=reduction)
    objective = make_objective(config)
    ranks = [[batch()[0]], [], [batch()[1]]]
    local = [component_totals(rank, objective.components) for rank in ranks]
    summed = {
        name: ComponentTotals(
            *(sum(column) for column in zip(*(each[name] for each in local), strict=True))
        )
        for name in objective.components
    }
    weighting = make_weighting(config, objective)
    split = [weighting.trace_weight(t, summed) for rank in ranks for e in rank for t in e.traces()]
    assert split == [weight for _, weight in weigh(config)]


def test_paper_weights_are_one():
    assert make_weighting(algorithm(), make_objective(algorithm())).weights == {
        SEARCH: 1.0,
        AGGREGATION: 1.0,
    }


@pytest.mark.parametrize("design", ["uniform", "ordered", "balanced"])
def test_unbiased_weights_divide_by_the_scales(design):
    config = algorithm(
        search_traces=4,
        num_sets=4,
        aggregation_traces=3,
        set_design=design,
        component_weights="unbiased",
    )
    weights = make_weighting(config, make_objective(config)).weights
    scale = gradient_scale(4, 2, 4, design)
    assert weights == {SEARCH: 1 / scale, AGGREGATION: 1 / 8}


def test_the_papers_shape_weighs_aggregation_twelve_times():
    config = AlgorithmConfig()
    scales = make_objective(config).gradient_scales()
    # 1 - C(35, 4) / C(70, 4), twice, less one.
    exact = 2 * (1 - Fraction(35 * 34 * 33 * 32, 70 * 69 * 68 * 67)) - 1
    assert scales == {SEARCH: float(exact), AGGREGATION: 12.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_sets": 1}, r"the search advantages are always 0"),
        ({"search_traces": 2, "num_sets": 1}, r"the search advantages are always 0"),
        ({"aggregation_traces": 1}, r"the aggregation advantages are always 0"),
        ({"objective": "grpo", "search_traces": 1}, r"the search advantages are always 0"),
        (
            {"objective": "grpo", "options": {"normalize_std": True}},
            r"normalize_std is true.*component_weights to 'paper'",
        ),
    ],
)
def test_unbiased_weights_that_do_not_exist_are_refused(changes, message):
    config = algorithm(component_weights="unbiased", **changes)
    with pytest.raises(ValueError, match=message):
        make_weighting(config, make_objective(config))


@pytest.mark.parametrize("key", ["component_weights", "loss_reduction"])
@pytest.mark.parametrize(
    ("objective", "names"),
    [
        ("spiral", [SEARCH]),
        ("spiral", [SEARCH, AGGREGATION, "critic"]),
        ("spiral", []),
        ("grpo", [SEARCH, AGGREGATION]),
    ],
)
def test_values_by_component_must_name_the_objectives_components(key, objective, names):
    config = algorithm(
        objective=objective,
        **{key: dict.fromkeys(names, 1.0 if key == "component_weights" else "sum")},
    )
    with pytest.raises(ValueError, match=rf"algorithm.{key} names .*give a value for each of \['"):
        make_weighting(config, make_objective(config))


def test_totals_that_leave_the_trace_out_are_refused():
    config = algorithm(loss_reduction="token_mean")
    weighting = make_weighting(config, make_objective(config))
    with pytest.raises(ValueError, match=r"totals of search are 1 problems, 0 traces and 0 tokens"):
        weighting.trace_weight(trace(SEARCH, 0, 3, 0.0), {SEARCH: ComponentTotals(1, 0, 0)})


def test_traces_without_credit_count_in_the_totals():
    episodes = batch()
    objective = make_objective(algorithm(target_length=1))
    for one in episodes:
        objective.assign_credit(one)
    assert component_totals(episodes, objective.components)[SEARCH].tokens == 21
