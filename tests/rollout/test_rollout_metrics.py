"""The metrics of a step against numbers worked out by hand, also with ranks that sampled nothing."""

import logging

import pytest

from spiral_mega.config import SyncConfig
from spiral_mega.rollout.batch_metrics import MismatchError, check_mismatch
from tests.rollout.launches import METRIC_TRACES, of_ranks
from tests.rollout.rank_jobs import metrics_of

# Four traces: 3, 1, 1 and 0 tokens; rewards 1, 0, 0.5, 0; two cut, one gated; finite log-probs -1, -2 and -0.5.
BY_HAND = {
    "batch/prompts_kept": 2.0,
    "batch/prompts_sampled": 8.0,
    "batch/prompts_surplus": 3.0,
    "batch/effective_share": 5 / 8,
    "batch/prompts_cancelled": 2.0,
    "rollout/prompt_tokens": 12.0,
    "rollout/prefix_cache_hit_rate": 3 / 12,
    "rollout/response_tokens": 5.0,
    "reward/search": 1.5 / 4,
    "gated/search": 1 / 4,
    "truncated/search": 2 / 4,
    "length/search": 5 / 4,
    "entropy/search": 3.5 / 3,
    "verify/ok": 3.0,
    "verify/timeout": 1.0,
}


def test_metrics_of_one_rank(runtime):
    assert metrics_of(runtime, [METRIC_TRACES]) == pytest.approx(BY_HAND)


@pytest.mark.parametrize("job", ["metrics_of_both", "metrics_of_one"])
def test_metrics_over_two_ranks_are_the_same_on_both(job):
    assert of_ranks(2, job) == [pytest.approx(BY_HAND)] * 2


def test_a_rank_and_a_batch_without_a_trace_are_no_division_by_zero(runtime):
    metrics = metrics_of(runtime, [[]])
    assert metrics["rollout/response_tokens"] == 0
    assert not any(name.startswith(("reward", "length", "entropy")) for name in metrics)


def test_traces_without_a_single_token_have_an_entropy_of_zero(runtime):
    metrics = metrics_of(runtime, [METRIC_TRACES[3:]])
    assert (metrics["entropy/search"], metrics["length/search"], metrics["truncated/search"]) == (
        0.0,
        0.0,
        1.0,
    )


def test_a_mismatch_past_its_bound_warns_or_stops_and_says_what_helps(caplog):
    for bound, kl in ((None, 5.0), (0.1, 0.1), (0.1, 0.0)):
        check_mismatch({"sampler/kl": kl}, SyncConfig(max_kl=bound, on_max_kl="stop"))
    check_mismatch({}, SyncConfig(max_kl=0.1, on_max_kl="stop"))  # a step without an update
    with pytest.raises(
        MismatchError, match=r"sampler/kl is 0\.2, above rollout\.sync\.max_kl \(0\.1\)"
    ):
        check_mismatch({"sampler/kl": 0.2}, SyncConfig(max_kl=0.1, on_max_kl="stop"))
    with caplog.at_level(logging.WARNING):
        check_mismatch({"sampler/kl": 0.2}, SyncConfig(max_kl=0.1))
    assert "algorithm.max_sequence_ratio" in caplog.text
