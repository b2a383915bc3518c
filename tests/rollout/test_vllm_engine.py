"""vLLM in the ranks' own processes samples from the policy's weights, however sharded and whatever is trained."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rollout.vllm_jobs import STOPS, UPDATES, requests
from tests.support.ranks import run_ranks
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.vllm

LORA = {"rank": 4}
CASES: dict[str, tuple[int, bool, Any, dict[str, Any]]] = {
    # ranks, tied head, LoRA, keys of rollout; a bucket of 0.001 MiB is smaller than most tensors
    "one rank, tied": (1, True, None, {}),
    "two engines, untied, asleep between": (
        2,
        False,
        None,
        {"sync.bucket_mb": 0.001, "engine.sleep": True},
    ),
    "one engine on two ranks, tied, LoRA": (
        2,
        True,
        LORA,
        {"engine.tensor_parallel": 2, "sync.bucket_mb": 0.05},
    ),
    "two engines, tied, adapter": (2, True, LORA, {"sync.lora": "adapter", "engine.sleep": True}),
    "one engine on four ranks, untied, adapter": (
        4,
        False,
        LORA,
        {"engine.tensor_parallel": 4, "sync.lora": "adapter"},
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name)
def ranks(request, tmp_path_factory):
    """What each rank measured; see vllm_jobs.lab."""
    world, tied, lora, rollout = CASES[request.param]
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(folder, "qwen3", tied=tied, num_attention_heads=4, num_key_value_heads=2)
    return run_ranks(world, "tests.rollout.vllm_jobs:lab", (folder, lora, rollout), timeout_s=600)


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
            assert "rollout.sync.max_logprob_gap" in rank["stale"][kind], kind


def test_a_sample_depends_on_its_seed_and_prompt_alone(ranks):
    for rank in ranks:
        first = {(each.key, each.index): each.token_ids for each in rank["samples"]}
        assert [each.token_ids for each in rank["alone"]] == [
            first[each.key, 0] for each in rank["alone"]
        ]
        assert rank["shifted"][0].token_ids == first[requests()[0].key, 2]  # seed + i is sample i
        assert [each.token_ids for each in rank["late"]] == [
            each.token_ids for each in rank["samples"]
        ]
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


def test_an_aborted_request_gives_nothing_more_and_can_be_asked_again(ranks):
    for rank in ranks:
        found = rank["aborted"]
        whole = {(each.key, each.index): each.token_ids for each in rank["samples"]}
        assert {each.key for each in found["rest"]} == {requests()[1].key}
        assert [each.token_ids for each in found["again"]] == [
            whole[requests()[0].key, i] for i in range(3)
        ]
        assert {
            each.index
            for each in [*found["early"], *found["rest"]]
            if each.key == requests()[1].key
        } == {0, 1, 2}


def test_ranks_of_one_engine_sample_the_same(ranks):
    tokens = [[each.token_ids for each in rank["samples"]] for rank in ranks]
    assert all(each == tokens[0] for each in tokens)


def test_the_process_is_left_as_it_was(ranks):
    for rank in ranks:
        assert rank["after"] == rank["before"]
        assert rank["after"]["settable"]


def test_memory_changes_hands_in_order(ranks, request):
    """The engine sleeps, the policy learns, torch's cache is freed, and the engine wakes: first weights, then cache."""
    rollout = CASES[request.node.callspec.params["ranks"]][3]
    asleep, adapter = rollout.get("engine.sleep", False), "sync.lora" in rollout
    update = ["moments", "optimizer", "moments", "empty cache"]
    load = ["add adapter"] if adapter else ["rpc reload_weights"]
    around = {
        "before": [f"sleep {1 if adapter else 2}"] if asleep else [],
        "weights": ["wake ['weights']"] if asleep else [],
        "cache": ["wake ['kv_cache']"] if asleep else [],
    }
    expected = [
        *around["before"], *update, *around["weights"], *load, *around["cache"], "reset prefix cache", "sample",
    ]  # fmt: skip
    for rank in ranks:
        assert [call.split(" {")[0] for call in rank["calls"]] == expected


def test_rounds_of_syncing_and_sampling_do_not_grow(ranks):
    assert all(("growth" in rank) == (len(ranks) <= 2) for rank in ranks)
    for rank in ranks if len(ranks) <= 2 else ():
        assert rank["growth"]["files"] == 0
        assert rank["growth"]["mib"] < 8
