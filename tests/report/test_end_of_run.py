from spiral_mega.report.end_of_run import before_after_table


def test_shares_are_percentages_and_the_columns_are_aligned() -> None:
    before = {
        "eval/aggregation_accuracy": 0.25,
        "eval/pass@8": 0.5,
        "eval/length": 1200.0,
        "eval/gone": 1.0,
    }
    after = {
        "eval/aggregation_accuracy": 0.375,
        "eval/pass@8": 0.45,
        "eval/length": 900.0,
        "eval/new": float("nan"),
    }
    assert before_after_table(before, after).splitlines() == [
        "metric                     before  after     change",
        "-------------------------  ------  -----  ---------",
        "eval/aggregation_accuracy   25.0%  37.5%  +12.5 pts",
        "eval/pass@8                 50.0%  45.0%   -5.0 pts",
        "eval/length                 1,200    900       -300",
        "eval/gone                       1      -          -",
        "eval/new                        -    nan          -",
    ]
