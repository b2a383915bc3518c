"""vLLM in the ranks' own processes samples from the policy's weights, however sharded and whatever is trained."""

from __future__ import annotations

import pytest

from tests.rollout.vllm_jobs import STOPS, UPDATES
from tests.support.ranks import run_ranks
from tests.support.tiny_models import save_tiny_model

CASES = {
    # ranks, tensor parallel, tied head, LoRA
    "one rank, tied": (1, 1, True, None),
    "two engines, untied": (2, 1, False, None),
    "one engine on two ranks, tied, LoRA": (2, 2, True, {"rank": 4}),
}


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name)
def ranks(request, tmp_path_factory):
    """What each rank measured; see vllm_jobs.lab."""
    world, tensor_parallel, tied, lora = CASES[request.param]
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(folder, "qwen3", tied=tied)
    return run_ranks(world, "tests.rollout.vllm_jobs:lab", (folder, tensor_parallel, lora), timeout_s=400)


def test_logprobs_are_those_of_transformers_at_the_temperature(ranks):
    for rank in ranks:
        for sample, expected in zip(rank["samples"], rank["reference"], strict=True):
            assert sample.logprobs == pytest.approx(expected, abs=1e-4)


def test_after_every_update_the_engine_samples_from_the_moved_weights(ranks):
    for rank in ranks:
        assert len(rank["errors"]) == UPDATES
        assert max(rank["errors"]) < 1e-4
        assert max(rank["gaps"]) < 1e-4
        assert min(rank["moved"]) > 1e-2  # an engine that had stayed behind would be far off


def test_stale_and_partial_weights_stop_the_run_on_every_rank(ranks):
    for rank in ranks:
        for kind in ("stale", "partial"):
            assert "rollout.max_sync_gap" in rank["stale"][kind], kind


def test_a_sample_depends_on_its_seed_and_prompt_alone(ranks):
    for rank in ranks:
        first = {(each.key, each.index): each.token_ids for each in rank["samples"]}
        assert [each.token_ids for each in rank["alone"]] == [first[each.key, 0] for each in rank["alone"]]
        assert rank["shifted"][0].token_ids == first[(0,), 2]  # seed + i is sample i
        assert [each.token_ids for each in rank["late"]] == [each.token_ids for each in rank["samples"]]
    assert len({tuple(tokens) for tokens in first.values()}) > len(first) // 2


def test_the_end_token_is_kept_and_tells_stop_from_length(ranks):
    finishes = set()
    for sample in ranks[0]["samples"]:
        finishes.add(sample.finish)
        assert (sample.finish == "stop") == (sample.token_ids[-1] in STOPS)
        assert not STOPS & set(sample.token_ids[:-1])
        assert len(sample.token_ids) == 8 or sample.finish == "stop"
        assert len(sample.logprobs) == len(sample.token_ids)
    assert finishes == {"stop", "length"}


def test_ranks_of_one_engine_sample_the_same(ranks):
    tokens = [[each.token_ids for each in rank["samples"]] for rank in ranks]
    assert all(each == tokens[0] for each in tokens)


def test_the_process_is_left_as_it_was(ranks):
    for rank in ranks:
        assert rank["after"] == rank["before"]
        assert rank["after"]["settable"]


def test_rounds_of_syncing_and_sampling_do_not_grow(ranks):
    for rank in ranks:
        assert rank["growth"]["files"] == 0
        assert rank["growth"]["mib"] < 8
