"""What aggregation does, and whether it can tell right from wrong, on episodes where the truth is known."""

import random

import pytest

from spiral_mega.analysis import aggregation, tokens, verification
from tests.analysis.episodes import episode, right, wrong


def test_each_set_falls_in_its_case_and_success_is_counted_over_answers():
    search = [right(0), wrong(1), wrong(1), wrong(2), right(0), right(3)]
    sets = [(1, 2, 3), (0, 1, 2), (0, 4, 1), (0, 4, 5), (0, 1), (0, 1, 2, 3)]
    answers = [
        [right(), wrong()],  # none right
        [right(), right(), wrong(), wrong()],  # a minority, outvoted
        [right(), wrong(), wrong(), wrong()],  # a majority
        [right()],  # all
        [wrong()],  # half; the first of the tied is right
        [wrong()],  # a minority, outvoted
    ]
    made, groups = episode(search, sets, answers)
    found = aggregation.aggregate([aggregation.episode_stats(made, groups)], 0)
    of = {
        name: (each["value"], each["of"]) for name, each in found.items() if isinstance(each, dict)
    }
    assert of == {
        "none_right": (0.5, 2),
        "minority_right": (pytest.approx(2 / 5), 5),
        "half_right": (0.0, 1),
        "majority_right": (0.25, 4),
        "all_right": (1.0, 1),
        "breaks_majority": (0.75, 4),
        "plurality_wrong": (pytest.approx(2 / 5), 5),
    }
    by_right = {(each["size"], each["right"]): each["value"] for each in found["by_right"]}
    assert by_right == {
        (3, 0): 0.5,
        (3, 1): 0.5,
        (3, 2): 0.25,
        (3, 3): 1.0,
        (2, 1): 0.0,
        (4, 1): 0.0,
    }


def test_sets_of_answers_are_judged_by_those_answers():
    """Positions past the search: a set of the second level."""
    made, groups = episode([wrong(1)] * 2, [(0, 1), (2, 3)], [[right(0), right(0)], [wrong(1)]])
    found = aggregation.aggregate([aggregation.episode_stats(made, groups)], 0)
    assert found["none_right"]["value"] == 1.0
    assert found["all_right"]["value"] == 0.0


def mixed(choose):
    """Sets of one right (group 0) and three wrong members (1, 1, 2), with 50 answers that `choose` gives."""
    search = [right(0), wrong(1), wrong(1), wrong(2)]
    return episode(search, [(0, 1, 2, 3)], [[choose(i) for i in range(50)]])


def summary(*episodes):
    return verification.aggregate([verification.episode_stats(*each) for each in episodes], 0)


def test_a_perfect_verifier_accepts_the_right_and_rejects_the_wrong():
    found = summary(mixed(lambda i: right(0)))
    assert (
        found["balanced_accuracy"],
        found["right_choice"]["value"],
        found["novel"]["value"],
    ) == (1.0, 1.0, 0.0)


def test_a_voter_accepts_what_most_say():
    found = summary(mixed(lambda i: wrong(1)))
    assert found["right_choice"]["value"] == 0.0
    assert found["balanced_accuracy"] == pytest.approx((0 + 1 / 3) / 2)


def test_a_random_pick_scores_the_chance_that_is_reported():
    rng = random.Random(0)
    members = [right(0), wrong(1), wrong(1), wrong(2)]
    found = summary(*[mixed(lambda i: rng.choice(members)) for _ in range(200)])
    assert found["chance"]["value"] == 0.25
    # accepts right 1/4; of the wrong, those of group 1 (2 of 3) are rejected half of the time, the other 3/4
    assert found["chance_balanced_accuracy"] == pytest.approx((1 / 4 + (2 * 1 / 2 + 3 / 4) / 3) / 2)
    assert found["right_choice"]["value"] == pytest.approx(0.25, abs=0.02)
    assert found["balanced_accuracy"] == pytest.approx(found["chance_balanced_accuracy"], abs=0.02)


def test_answers_that_no_member_gave_choose_nothing():
    found = summary(
        mixed(lambda i: [right(9), wrong(8), wrong(None), right(0)][i % 4] if i < 48 else wrong(7))
    )
    assert found["novel"]["value"] == pytest.approx(38 / 50)
    assert found["novel_right"]["value"] == pytest.approx(12 / 38)
    assert found["right_choice"]["of"] == 12


def test_sets_that_are_all_right_or_all_wrong_say_nothing_of_verification():
    made = episode([right(0), right(0), wrong(1)], [(0, 1), (2,)], [[right(0)], [wrong(1)]])
    assert verification.episode_stats(*made) == {}
    assert summary(made)["balanced_accuracy"] is None


def test_tokens_are_told_apart_by_difficulty_level_and_outcome():
    easy = episode([right(0, [1] * 4), right(0, [1] * 2)], [(0, 1)], [[wrong(1, [1] * 9)]])
    hard = episode([wrong(1, [1] * 10), wrong(1, [1] * 20)], [(0, 1)], [[right(0, [1] * 7)]])
    half = episode([wrong(1, [1] * 10), right(0, [1] * 20)])
    hard_bin, half_bin, easy_bin = tokens.aggregate(
        [tokens.episode_stats(*each) for each in (easy, hard, half)], 0
    )
    assert (hard_bin["solved"], hard_bin["levels"][0]["tokens"]["value"]) == ("none", 15.0)
    assert (hard_bin["levels"][0]["right"], hard_bin["levels"][1]["right"]["value"]) == (None, 7.0)
    assert (half_bin["solved"], half_bin["levels"][0]["right"]["value"]) == ("up to 1/2", 20.0)
    assert (easy_bin["solved"], easy_bin["levels"][1]["wrong"]["value"]) == ("all", 9.0)


@pytest.mark.parametrize(
    ("rate", "name"), [(0, "none"), (0.25, "up to 1/4"), (0.26, "up to 1/2"), (0.99, "below all")]
)
def test_bins_of_difficulty_have_the_edges_they_say(rate, name):
    assert tokens.BINS[tokens.difficulty(rate)] == name
