"""The metrics of a step's updates: counts add up, maxima stay maxima, everything else is a mean."""

from spiral_mega.telemetry.combine import combine_updates


def test_counts_add_up_maxima_stay_and_the_rest_are_means():
    first = {
        "train/loss": 1.0,
        "train/tokens": 10.0,
        "optim/skipped": 0.0,
        "sampler/log_ratio_abs_max": 0.5,
    }
    second = {
        "train/loss": 2.0,
        "train/tokens": 30.0,
        "optim/skipped": 1.0,
        "sampler/log_ratio_abs_max": 0.25,
    }
    assert combine_updates([first, second]) == {
        "train/loss": 1.5,
        "train/tokens": 40.0,
        "optim/skipped": 1.0,
        "sampler/log_ratio_abs_max": 0.5,
    }


def test_one_update_is_itself_and_none_has_no_metrics():
    only = {"train/loss": -0.1, "sampler/masked_tokens": 3.0}
    assert combine_updates([only]) == only
    assert combine_updates([]) == {}
