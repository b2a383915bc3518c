"""The same task gives the same episode, whoever samples it; a stop on one rank stops all of them, and none hangs."""

import pytest

from spiral_mega.rollout.engine import RequestKey
from spiral_mega.rollout.exchange import LAG
from spiral_mega.traces import AGGREGATION, SEARCH
from tests.rollout.launches import PROBLEMS, of_ranks, real_config
from tests.rollout.rank_jobs import episodes
from tests.rollout.scripted import UNEVEN, ScriptedEngine, first_come, pipeline_of, settings
from tests.support.tiny_models import END_ID


@pytest.fixture(scope="module")
def alone(runtime):
    return episodes(runtime, real_config(), PROBLEMS)


@pytest.fixture(scope="module")
def backwards(runtime):
    return episodes(runtime, real_config(), PROBLEMS[::-1])


@pytest.fixture(scope="module")
def ranks():
    return of_ranks(2, "episodes")


def assert_same_episodes(left, right):
    assert left.keys() == right.keys()
    for name, episode in left.items():
        other = right[name]
        assert (episode.problem, episode.sets) == (other.problem, other.sets)
        for a, b in zip(episode.traces(), other.traces(), strict=True):
            assert (a.prompt_ids, a.response_ids, a.finish, a.text) == (
                b.prompt_ids,
                b.response_ids,
                b.finish,
                b.text,
            )
            assert (a.reward, a.verification) == (b.reward, b.verification)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_real_episodes_are_the_same_on_one_rank_and_on_two(alone, ranks):
    assert all(len(rank["episodes"]) == len(PROBLEMS) // 2 for rank in ranks)
    assert_same_episodes(alone["episodes"], ranks[0]["episodes"] | ranks[1]["episodes"])


def test_real_episodes_do_not_depend_on_the_order_of_the_problems(alone, backwards):
    assert_same_episodes(alone["episodes"], backwards["episodes"])


def test_real_episodes_are_varied_enough_to_tell(alone):
    """Many different responses, ended and cut, right and wrong."""
    traces = [trace for episode in alone["episodes"].values() for trace in episode.traces()]
    assert len({tuple(trace.response_ids) for trace in traces}) > len(traces) * 0.9
    assert {trace.finish for trace in traces} == {"stop", "length"}
    assert {trace.reward for trace in traces} == {0.0, 1.0}
    assert all((trace.response_ids[-1] == END_ID) == (trace.finish == "stop") for trace in traces)


def test_evaluation_gives_the_same_numbers_again_and_on_any_number_of_ranks(alone, ranks):
    """With the same weights, whatever was sampled in between."""
    assert len(alone["before"]) == 3
    assert 0 < alone["before"]["eval/search_accuracy"] < 1
    for each in (alone, *ranks):
        assert each["before"] == each["after"]
        assert each["before"] == pytest.approx(alone["before"])


@pytest.mark.parametrize("case", ["stopped_early", "stopped_while_the_other_has_no_task"])
def test_a_stop_on_one_rank_stops_all(case):
    results = of_ranks(2, case)
    assert [result["raised"] for result in results] == [True, True]
    assert [result["together"] for result in results] == [[0, 1]] * 2


def test_a_stop_is_seen_when_its_exchange_is_applied_and_leaves_nothing_in_the_engines():
    assert of_ranks(2, "stopped_early")[1]["done"] == 4 + LAG
    assert of_ranks(2, "stopped_while_the_other_has_no_task")[0]["done"] == 1 + LAG
    for case in ("stopped_early", "stopped_while_the_other_has_no_task"):
        assert not any(result["left"] for result in of_ranks(2, case))


def test_a_stop_that_comes_when_all_is_sampled_loses_nothing():
    results = of_ranks(2, "stopped_after_the_end")
    assert [result["raised"] for result in results] == [False, False]
    assert [result["done"] for result in results] == [14, 14]


def test_sets_go_to_the_engine_that_reads_less_and_come_back_as_if_sampled_by_the_owner(verifier):
    ranks = of_ranks(2, "uneven")
    asked = [rank["asked"] for rank in ranks]
    searches = [[key for key in rank if key.component == SEARCH] for rank in asked]
    assert sorted(searches[0] + searches[1]) == [RequestKey(i, SEARCH) for i in range(6)]
    assert all(key.episode % 2 == rank for rank in (0, 1) for key in searches[rank])
    sets = [[key for key in rank if key.component != SEARCH] for rank in asked]
    assert sorted(sets[0] + sets[1]) == [
        RequestKey(i, AGGREGATION, l) for i in range(6) for l in range(4)
    ]
    away = [sum(key.episode % 2 != rank for key in sets[rank]) for rank in (0, 1)]
    assert away[1] > 0, "the second rank reads little and helps the first"
    tokens = asked[0] | asked[1]
    read = [sum(tokens[key] for key in sets[rank]) for rank in (0, 1)]
    owned = [
        sum(tokens[key] for key in sets[0] + sets[1] if key.episode % 2 == rank) for rank in (0, 1)
    ]
    assert abs(read[0] - read[1]) < abs(owned[0] - owned[1]) / 2
    config = settings(rollout={"sampling.max_context_tokens": 128})
    alone = pipeline_of(ScriptedEngine(first_come), verifier, config).run(UNEVEN)
    assert sorted(ranks[0]["episodes"] + ranks[1]["episodes"], key=lambda each: each.index) == alone
    assert [each.index for each in ranks[0]["episodes"]] == [0, 2, 4]


def test_an_engine_continues_while_another_is_late_and_what_is_sampled_where_stays_the_same():
    assert of_ranks(2, "uneven, the first late") == of_ranks(2, "uneven")


def test_what_is_started_and_cancelled_follows_from_the_work_and_not_from_the_clock():
    ranks = of_ranks(2, "late tasks")
    assert of_ranks(2, "late tasks, hesitating") == ranks
    assert ranks[0]["reported"] == ranks[1]["reported"]
    finalized = [index for reported in ranks[0]["reported"] for index in reported]
    assert sum(index % 3 != 0 for index in finalized) >= 4
    whole = {each.index for rank in ranks for each in rank["episodes"]}
    assert set(finalized) <= whole
    assert len(ranks[0]["reported"]) > 2, "all were started at once: nothing was tested"
    assert not any(rank["left"] for rank in ranks)
    assert any(kind == "abort" for rank in ranks for kind, _ in rank["events"])


def test_ranks_that_share_an_engine_give_it_the_same_in_the_same_order():
    """They would wait for one another without end otherwise."""
    ranks = of_ranks(4, "late tasks, hesitating")
    assert of_ranks(4, "late tasks") == ranks
    assert [ranks[0], ranks[2]] == of_ranks(2, "late tasks"), "an engine's ranks count as one"
    for leader, other in (ranks[:2], ranks[2:]):
        assert other == leader | {"episodes": []}


def test_searches_and_answers_of_one_episode_use_different_randomness(alone):
    """An aggregation that drew the search's uniforms again would not be a new sample."""
    for episode in alone["episodes"].values():
        groups = [episode.search, *episode.aggregation]
        first = [
            tuple(trace.response_ids) for group in groups for trace in group if trace.length > 2
        ]
        assert len(set(first)) == len(first)
        assert all(trace.component == SEARCH for trace in episode.search)
