"""Verdicts, factors and the set score against enumeration and closed forms."""

from itertools import product

import numpy as np
import pytest

from spiral_mega.errors import UserError
from spiral_mega.reproduction.findings import (
    Finding,
    compare,
    paper_findings,
    response_factors,
    value_of,
)
from spiral_mega.reproduction.markdown_report import BEGIN, END, write_into
from spiral_mega.reproduction.set_score import hard_problem_weight, set_score, set_score_slope


def test_a_difference_is_paired_by_problem_and_seed():
    theirs = np.random.default_rng(3).random((3, 50))
    found = compare(
        Finding("c", "q", value_of("m"), "higher"), {"m": theirs + 0.25}, {"m": theirs}, "other"
    )
    assert (found.problems, found.crossed) == (
        pytest.approx((0.25, 0.25)),
        pytest.approx((0.25, 0.25)),
    )
    assert (found.mean, found.verdict, found.by_seed) == (
        pytest.approx(0.25),
        "holds",
        pytest.approx([0.25] * 3),
    )


@pytest.mark.parametrize(
    ("shift", "verdict"), [(1.0, "holds"), (-1.0, "opposite"), (0.0, "undecided")]
)
def test_a_finding_holds_only_where_the_interval_excludes_zero(shift, verdict):
    noise = np.random.default_rng(4).normal(size=(3, 60))
    noise -= noise.mean()
    assert (
        compare(
            Finding("c", "q", value_of("m"), "higher"), {"m": noise + shift}, {"m": 0 * noise}, "o"
        ).verdict
        == verdict
    )


def test_arms_of_fewer_seeds_are_compared_on_the_seeds_that_both_have():
    ours = np.array([[1.0, 1.0], [5.0, 5.0]])
    assert (
        compare(Finding("c", "q", value_of("m"), "higher"), {"m": ours}, {"m": ours[:1]}, "o").mean
        == 0.0
    )


def test_the_efficiency_of_curves_that_grow_with_log_k_is_their_shift():
    ks = [1, 2, 4, 8, 16, 32]
    theirs = [0.1 * np.log2(k) for k in ks]
    ours = [0.1 * np.log2(3 * k) for k in ks]  # needs a third of the responses
    factors = response_factors(ks, ours, theirs)
    assert [factors[str(k)] for k in ks[:4]] == pytest.approx([3.0] * 4)
    assert factors["16"] is None  # would take 48
    assert factors["32"] is None
    assert response_factors(ks, theirs, theirs) == pytest.approx({str(k): 1.0 for k in ks})


def test_every_measure_of_the_findings_is_one_that_the_task_evaluates():
    read = []

    class Reading(dict):
        def __missing__(self, key):
            read.append(key)
            return np.zeros((1, 1))

    for finding in paper_findings([1, 4], 2, 8):
        finding.values(Reading())
    assert set(read) == {
        *(
            "pass_at_k pass 4",
            "majority majority 4",
            "sequential mean 8",
            "rsa mean 0",
            "rsa mean 2",
        ),
    }


def test_tables_are_written_between_the_marks_of_their_start_and_nowhere_else(tmp_path):
    document = tmp_path / "d.md"
    begin, end = BEGIN.format(start="demo"), END.format(start="demo")
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_into(document, "new", "demo")
    write_into(document, "newer", "demo")
    assert document.read_text() == f"before\n{begin}\n\nnewer\n\n{end}\nafter\n"
    with pytest.raises(UserError, match="lacks the lines"):
        write_into(document, "new", "copying")


SUCCESS = [0.1, 0.35, 0.5, 0.7, 0.75]


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_the_set_score_is_the_mean_over_all_sets_and_its_slope_that_of_finite_differences(p):
    sets = product([0, 1], repeat=4)
    expected = sum(
        p ** sum(each) * (1 - p) ** (4 - sum(each)) * SUCCESS[sum(each)] for each in sets
    )
    assert set_score(SUCCESS, p) == pytest.approx(expected, abs=1e-12)
    h = 1e-6
    difference = (set_score(SUCCESS, p + h) - set_score(SUCCESS, p - h)) / (2 * h)
    assert set_score_slope(SUCCESS, p) == pytest.approx(difference, abs=1e-7)


def test_a_linear_aggregator_weighs_problems_alike_and_one_that_finds_any_right_trace_as_pass_at_4_does():
    assert hard_problem_weight([0.1, 0.2, 0.3, 0.4, 0.5]) == pytest.approx(1.0)
    assert hard_problem_weight([0.0, 1.0, 1.0, 1.0, 1.0]) == pytest.approx((0.9 / 0.5) ** 3)
