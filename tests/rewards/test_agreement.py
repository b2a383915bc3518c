"""Answers are grouped as the verifier compares them, and not by their spelling."""

import pytest

from spiral_mega.rewards import VerifierPool, group_answers


@pytest.fixture(scope="module")
def verifier():
    with VerifierPool(time_limit_s=10.0, workers=1, verifiers=("math",)) as shared:
        yield shared


def boxed(*answers):
    return [f"so \\boxed{{{answer}}}" for answer in answers]


def test_mathematical_answers_are_grouped_by_value(verifier):
    responses = [
        *boxed("\\frac{1}{2}", "0.5", "3", "1/2", "x^2+2x", "3.0", "x(x+2)"),
        "no answer",
        *boxed(""),
    ]
    assert group_answers(responses, "math", verifier) == [0, 0, 1, 0, 2, 1, 2, None, None]


def test_an_equality_that_holds_in_one_direction_is_enough_and_order_decides_the_group(verifier):
    """62.5 % reads as 62.5 and as 0.625, which are not the same number."""
    for answers in (("(-\\infty,2)", "x<2"), ("x<2", "(-\\infty,2)")):
        assert group_answers(boxed(*answers), "math", verifier) == [0, 0], (
            "equal only with the second as ground truth"
        )
    assert group_answers(boxed("62.5\\%", "62.5", "0.625"), "math", verifier) == [0, 0, 0]
    assert group_answers(boxed("62.5", "0.625", "62.5\\%"), "math", verifier) == [0, 1, 0]


def test_hostile_answers_stay_apart_and_stop_nothing(verifier):
    assert group_answers(boxed("9^{9^{9^{9}}}", "2", "9^{9^{9^{9}}}", "2.0"), "math", verifier) == [
        0,
        1,
        0,
        1,
    ]


def test_paths_of_numbers_are_the_same_when_their_numbers_are(verifier):
    assert group_answers(["1 2 3", " 1  02 3", "1 2 4", "1 x", ""], "arithmetic", verifier) == [
        0,
        0,
        1,
        None,
        None,
    ]


def test_a_kind_of_ones_own_is_read_as_text_unless_its_module_knows_better(verifier):
    assert group_answers(
        ["a ", "b", "\\boxed{a}"], "tests.rewards.bad_verifiers:NOT_CALLABLE", verifier
    ) == [0, 1, 0]
    kind = "tests.rewards.caseless:score"
    assert group_answers(["Yes.", "yes", "No", "?"], kind, verifier) == [0, 0, 1, None]


def test_a_comparison_that_never_ends_leaves_the_others_as_they_are():
    with VerifierPool(time_limit_s=1.0, workers=1, verifiers=()) as impatient:
        kind = "tests.rewards.caseless:score"
        assert group_answers(["loop", "Yes", "yes", "no"], kind, impatient) == [0, 1, 1, 2]
