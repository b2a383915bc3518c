"""What the Megatron policy cannot do is refused before anything is loaded, with the key, the reason and the remedy."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from spiral_mega.errors import UserError
from spiral_mega.policy import check_policy
from spiral_mega.validation.contradictions import find_contradictions
from tests.support.configs import make_config
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.megatron

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BOTH = {"tensor_parallel": 2, "expert_parallel": 2}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def config_for(folder: Path, **layout: Any) -> Any:
    return make_config(folder, policy={"backend": "megatron", "megatron": layout})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"policy": {"megatron": {"tensor_parallel": 2}}}, "policy.backend is 'fsdp'"),
        (
            {"policy": {"backend": "megatron", "megatron": {"virtual_stages": 2}}},
            "virtual_stages is 2",
        ),
        ({"policy": {"backend": "megatron"}, "optimizer": {"offload": True}}, "optimizer.offload"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_no_model_changes_is_a_contradiction_of_the_configuration(
    sections: Any, message: str
) -> None:
    found = [
        text
        for text in find_contradictions(make_config(Path("unused"), **sections))
        if message in text
    ]
    assert len(found) == 1
    assert ":" in found[0]  # and then the remedy


@pytest.mark.parametrize(
    ("family", "model", "layout", "ranks", "message"),
    [
        ("qwen3", {}, {"spec": "te"}, 1, "transformer_engine is not installed"),
        ("qwen3", {}, {"tensor_parallel": 2}, 3, "does not divide 3 ranks"),
        ("qwen3", {}, {"context_parallel": 2}, 3, r"context_parallel \(2\)"),
        ("qwen3", {}, {"tensor_parallel": 4}, 4, r"num_key_value_heads \(2\)"),
        (
            "qwen3",
            {"intermediate_size": 97},
            {"tensor_parallel": 2},
            2,
            r"intermediate_size \(97\)",
        ),
        ("qwen3", {"num_hidden_layers": 3}, {"pipeline_parallel": 4}, 4, "3 layers"),
        (
            "qwen3",
            {"num_hidden_layers": 3},
            {"pipeline_parallel": 2, "virtual_stages": 2},
            2,
            "3 layers",
        ),
        ("qwen3", {}, {"expert_parallel": 2}, 2, "no experts"),
        ("qwen3_moe", {}, {"expert_parallel": 3}, 3, "4 experts"),
        ("qwen3_moe", {}, {"expert_parallel": 2}, 1, "does not divide the 1 ranks"),
        ("qwen3_moe", {}, {"tensor_parallel": 2}, 2, "expert_parallel 1"),
        (
            "qwen3_moe",
            {},
            BOTH | {"sequence_parallel": False},
            2,
            "sequence_parallel is false",
        ),
        ("llama", {"attention_bias": True}, {}, 1, "biases"),
        ("llama", {"mlp_bias": True}, {}, 1, "without biases"),
        ("llama", {"hidden_act": "gelu"}, {}, 1, "gelu"),
        ("qwen2", SLIDING, {}, 1, "attention than full"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_the_model_or_the_ranks_do_not_allow_is_reported(
    family: Any,
    model: dict[str, Any],
    layout: dict[str, Any],
    ranks: int,
    message: str,
    tmp_path: Path,
) -> None:
    folder = save_tiny_model(tmp_path / "model", family, tied=False, **(HEADS | model))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=message):
        check_policy(config_for(folder, **layout), ranks)


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("qwen3_moe", ["q_proj", "up_proj"], "names up_proj, but the model has experts"),
        ("llama", ["lm_head"], "alone"),
    ],
)
def test_adapters_that_cannot_be_are_reported(
    family: Any, targets: list[str], message: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model", family, tied=False, **HEADS)
    policy = {"backend": "megatron", "megatron": {"pipeline_parallel": 2}}
    config = make_config(folder, policy=policy, model={"lora": {"targets": targets}})
    with pytest.raises(UserError, match=message):
        check_policy(config, 2)


def test_a_family_without_a_table_is_reported(tmp_path: Path) -> None:
    AutoConfig.for_model("gemma2").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'gemma2'"):
        check_policy(config_for(tmp_path), 1)


def test_without_a_gpu_the_command_says_how_it_runs_on_cpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "spiral_mega",
        "train",
        "configs/demo_megatron.yaml",
        f"run.dir={tmp_path}/run",
    ]
    command += ["policy.megatron.tensor_parallel=1", "rewards.workers=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert (
        "error: policy.backend is 'megatron', and megatron-core computes on GPUs only"
        in done.stderr
    )
    assert "tests.support.megatron_on_cpu" in done.stderr
