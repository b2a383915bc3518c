"""Engines sample from weights that megatron-core trains, however these and the engine are split; so do exports."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.megatron, pytest.mark.vllm]

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# model, tied, policy.megatron, rollout, model.lora
CASES: dict[str, tuple[Any, bool, dict[str, Any], dict[str, Any], Any]] = {
    "TP2, two vLLM engines": ("qwen3", True, {"tensor_parallel": 2}, {"engine.name": "vllm"}, None),
    "TP2, adapters into two vLLM engines": (
        *("qwen3", True, {"tensor_parallel": 2}, {"engine.name": "vllm", "sync.lora": "adapter"}),
        {"rank": 8, "alpha": 16},
    ),
    "PP2, adapters merged into a vLLM engine of two": (
        *(
            "llama",
            False,
            {"pipeline_parallel": 2},
            {"engine.name": "vllm", "engine.tensor_parallel": 2},
        ),
        {"rank": 8, "alpha": 16},
    ),
    "EP2, embedded engines": ("qwen3_moe", False, {"expert_parallel": 2}, {}, None),
    "EP2, two vLLM engines": (
        "qwen3_moe",
        False,
        {"expert_parallel": 2},
        {"engine.name": "vllm"},
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_engine_and_export_have_the_trained_weights_and_a_stale_engine_is_reported(
    name: str, tmp_path: Path
) -> None:
    family, tied, layout, rollout, lora = CASES[name]
    model = save_tiny_model(tmp_path / "model", family, tied=tied, **HEADS)
    arguments = (model, layout, rollout, lora, tmp_path / "export")
    for rank in run_ranks(2, "tests.policy_megatron.engine_jobs:lab", arguments):
        assert len(rank["gaps"]) == 3
        assert max(rank["gaps"]) < 1e-4
        assert "rollout.sync.max_logprob_gap" in rank["stale"]
        assert max(rank["errors"]) < 1e-4
