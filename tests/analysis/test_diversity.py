"""Diversity against values worked out by hand and against enumeration."""

import math
import random
from collections import Counter

import pytest

from spiral_mega.analysis import diversity, entropy, episode_stats
from spiral_mega.analysis.diversity import level_diversity
from spiral_mega.analysis.levels import level_positions
from tests.analysis.episodes import episode, right, trace, wrong


def test_answers_and_their_entropy_count_only_traces_that_answer():
    found = level_diversity([[1], [1], [1], [1]], [0, 0, 1, None])
    assert (found["traces"], found["answered"], found["answers"]) == (4.0, 3.0, 2.0)
    assert found["answer_entropy"] == pytest.approx(
        -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3)
    )
    assert level_diversity([[1]], [None])["answers"] is None


def test_equal_traces_have_no_distance_and_disjoint_ones_all_of_it():
    assert level_diversity([[1, 2, 3, 4]] * 3, [0] * 3)["distance"] == 0.0
    assert level_diversity([[1, 2, 3, 4], [5, 6, 7, 8]], [0, 0])["distance"] == 1.0
    # grams 123 234 345 | 234 345 456: 2 of 4 in common
    assert level_diversity([[1, 2, 3, 4, 5], [2, 3, 4, 5, 6]], [0, 0])["distance"] == pytest.approx(
        0.5
    )
    assert level_diversity([[1, 2, 3]], [0])["distance"] is None


def test_ngram_figures_are_those_of_plain_counting():
    rng = random.Random(3)
    responses = [[rng.randrange(3) for _ in range(rng.randrange(0, 12))] for _ in range(6)]
    grams = [tuple(each[i : i + 3]) for each in responses for i in range(len(each) - 2)]
    grams += [tuple(each) for each in responses if 0 < len(each) < 3]
    counts = Counter(grams)
    found = level_diversity(responses, [None] * 6)
    assert found["distinct_ngrams"] == len(counts) / len(grams)
    shares = [count / len(grams) for count in counts.values()]
    assert found["ngram_entropy"] == pytest.approx(-sum(p * math.log(p) for p in shares))


def test_levels_follow_from_the_sets_alone():
    made, _ = episode(
        [right()] * 3,
        [(0, 1), (1, 2), (3, 4), (5, 4)],
        [[right()] * 2, [right()], [right()], [wrong()]],
    )
    assert level_positions(made) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert level_positions(episode([right()] * 2)[0]) == [[0, 1]]


def test_each_level_is_summarised_over_the_problems_that_have_it():
    deep = episode([right(0), wrong(1)], [(0, 1)], [[right(0), right(0)]])
    flat = episode([right(0), right(0)])
    search, answers = diversity.aggregate(
        [diversity.episode_stats(*deep), diversity.episode_stats(*flat)], 0
    )
    assert (search["level"], search["answers"]["value"], search["answers"]["problems"]) == (
        "search",
        1.5,
        2,
    )
    assert (answers["level"], answers["answers"]["value"], answers["answers"]["problems"]) == (
        "aggregation 1",
        1.0,
        1,
    )


def test_entropy_is_the_mean_negative_log_prob_of_a_token_and_of_each_tenth():
    made, groups = episode([right()])
    made.search = [trace("search", 0, 1, range(20)), trace("search", 1, 1, [1])]
    made.search[0].logprobs = [-float(at // 2) for at in range(20)]
    made.search[1].logprobs = [float("-inf")]
    (found,) = entropy.aggregate([entropy.episode_stats(made, groups)], 0)
    assert found["entropy"]["value"] == pytest.approx(4.5)
    assert found["entropy"]["of"] == 20
    assert found["tenths"] == pytest.approx(list(range(10)))


def test_sets_that_are_for_credit_alone_have_no_answers_to_speak_of():
    made, groups = episode([right(), wrong()], [(0, 1)])
    assert made.aggregation == []
    stats = episode_stats(made, groups)
    assert (stats["aggregation"], stats["verification"], len(stats["diversity"])) == ([], {}, 1)
