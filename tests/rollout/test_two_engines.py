"""Of two models, search requests are answered by the one and all others by the other, in step with their policies."""

from typing import Any

import pytest

from tests.rollout.two_engines_jobs import ASKED, UPDATES
from tests.support.ranks import run_ranks
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.vllm

LORA = {"rank": 4}
ONE_VLLM = {
    "engine.name": "vllm",
    "engine.kv_cache_mb": 16,
    "sync.lora": "adapter",
    "engine.sleep": True,
}
TWO_VLLM = {"engine.name": "vllm", "engine.kv_cache_mb": 16}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By name what the first of two ranks found."""
    folder = tmp_path_factory.mktemp("models")
    shape = {"tied": True, "num_attention_heads": 4, "num_key_value_heads": 2}
    theta = save_tiny_model(folder / "theta", **shape)
    phi = save_tiny_model(folder / "phi", seed=1, **shape)
    adapters = {"model": {"path": str(theta), "lora": LORA}, "two_models": {"form": "adapters"}}
    models = {"two_models": {"form": "models", "aggregation_model": {"path": str(phi)}}}
    wanted = {
        "embedded, models": models,
        "embedded, adapters": adapters,
        "embedded, search frozen": {"two_models": models["two_models"] | {"frozen": "search"}},
        "one vLLM engine with two adapters, asleep between": adapters | {"rollout": ONE_VLLM},
        "two vLLM engines": models | {"rollout": TWO_VLLM},
    }
    argument = [{"folder": theta, **case} for case in wanted.values()]
    found = run_ranks(2, "tests.rollout.two_engines_jobs:lab", argument, timeout_s=600)[0]
    return dict(zip(wanted, found, strict=True))


@pytest.fixture(params=range(5))
def found(cases: dict[str, dict[str, Any]], request: pytest.FixtureRequest) -> dict[str, Any]:
    return list(cases.values())[request.param]


def test_each_component_is_sampled_from_its_own_model_after_every_update(
    found: dict[str, Any],
) -> None:
    assert len(found["errors"]) == UPDATES + 1
    assert max(max(errors.values()) for errors in found["errors"]) < 1e-4
    assert set(found["errors"][0]) == set(ASKED)
    assert found["apart"] > 1e-2, "the other model would have been found out"


def test_each_model_has_its_own_canary(found: dict[str, Any]) -> None:
    for gaps in found["gaps"]:
        assert gaps.keys() == {"sync/logprob_gap/search", "sync/logprob_gap/aggregation"}
        assert max(gaps.values()) < 1e-4
    assert found["stale"]
    for error in found["stale"].values():
        assert "rollout.sync.max_logprob_gap" in error


def test_a_frozen_model_goes_to_its_engine_once_and_answers_the_same_ever_after(
    cases: dict[str, Any],
) -> None:
    found = cases["embedded, search frozen"]
    assert found["stale"].keys() == {"aggregation"}
    first, *later = (
        [s for s in samples if s.key.component == "search"] for samples in found["samples"]
    )
    assert all(samples == first for samples in later)
