"""The traced memory of an update, and the planned memory of one on megatron-core, are what real ones take."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from spiral_mega.capacity import megatron_memory
from spiral_mega.capacity.memory import phases
from spiral_mega.capacity.traced_update import full_batch, trace
from spiral_mega.models.dimensions import measure_model
from spiral_mega.models.model_config import resolve_model_config
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree_batch import pack
from tests.support.configs import make_config
from tests.support.ranks import run_ranks
from tests.support.tiny_models import save_tiny_model

WORLD = 2
CPU_SCRATCH = (
    2 * 4 * 2**21 + 4 * 1900 * 4096
)  # two tiles of logits and the kept ones: kernels/cpu.py
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
CASES = {
    "every weight": {},
    "every weight, checkpointing": {
        "policy": {"activation_checkpointing": True, "microbatch_tokens": 4096}
    },
    "LoRA": {"model": {"lora": {"rank": 16}}},
}


def sequences() -> list[TrainingSequence]:
    """One micro-batch: 12 responses of 150 tokens to a prompt of 100."""
    prompt = list(range(1, 101))
    return [
        TrainingSequence(
            SequenceKey(0, i),
            prompt,
            [(7 * i + 3 * j) % 4000 + 1 for j in range(150)],
            [-8.0] * 150,
            1.0,
            1e-3,
        )
        for i in range(12)
    ]


def test_traced_peaks_are_within_ten_percent_of_real_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "MALLOC_MMAP_THRESHOLD_", "65536"
    )  # what is freed leaves the process at once
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "model")
    save_tiny_model(tmp_path / "small", vocab_size=4096)
    cases = {name: (tmp_path / "model", sections) for name, sections in CASES.items()}
    argument = tmp_path / "small", cases, sequences()
    ranks = run_ranks(WORLD, "tests.capacity.memory_job:peaks", argument)
    errors = {}
    for name, (folder, sections) in cases.items():
        found = trace(make_config(folder, **sections), WORLD, pack(sequences()), CPU_SCRATCH).peak
        errors[name] = found / max(rank[name] for rank in ranks) - 1
        measured = [round(rank[name] / 2**20) for rank in ranks]
        print(f"{name}: traced {found / 2**20:.0f} MiB, measured {measured}, {errors[name]:+.1%}")
    assert all(abs(error) < 0.10 for error in errors.values()), errors


MEGATRON: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "TP2": ({"tensor_parallel": 2}, {}),
    "TP2, checkpointing": (
        {"tensor_parallel": 2},
        {"policy": {"activation_checkpointing": True}},
    ),
    "PP2": ({"pipeline_parallel": 2}, {}),
    "TP2, LoRA": ({"tensor_parallel": 2}, {"model": {"lora": {"rank": 16}}}),
}


def test_what_megatron_takes_is_within_a_fifth_of_a_real_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "MALLOC_MMAP_THRESHOLD_", "65536"
    )  # what is freed leaves the process at once
    monkeypatch.setattr(megatron_memory, "HEAD_STRIP", CPU_SCRATCH / 2)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "model")
    save_tiny_model(
        tmp_path / "small", vocab_size=4096, num_attention_heads=4, num_key_value_heads=2
    )
    tokens = pack(sequences()).input_ids.numel()
    cases = {}
    for name, (layout, more) in MEGATRON.items():
        policy = {
            "backend": "megatron",
            "megatron": layout,
            "microbatch_tokens": tokens,
            **more.get("policy", {}),
        }
        cases[name] = tmp_path / "model", more | {"policy": policy}
    ranks = run_ranks(
        WORLD, "tests.capacity.megatron_memory_job:peaks", (tmp_path / "small", cases, sequences())
    )
    errors = {}
    for name, (folder, sections) in cases.items():
        config = make_config(folder, **sections)
        sizes = measure_model(resolve_model_config(config.model), config.model.lora)
        every = [
            {**t.resident, **t.moments, **t.update}
            for t in megatron_memory.stages(config, sizes, WORLD)
        ]
        found = max(sum(each.values()) for each in every)
        errors[name] = found / max(rank[name] for rank in ranks) - 1
        measured = [round(rank[name] / 2**20) for rank in ranks]
        print(
            f"{name}: planned {found / 2**20:.0f} MiB, measured {measured}, {errors[name]:+.1%}",
            every,
        )
    assert all(abs(error) < 0.20 for error in errors.values()), errors


DIMENSIONS = {
    **{
        "model_type": "qwen3",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "head_dim": 128,
    },
    **{
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize(("lora", "again"), [(None, True), ({"rank": 32}, False)])
def test_the_analytic_model_is_the_trace_and_up_to_a_fifth_more(
    lora: dict[str, int] | None, again: bool
) -> None:
    config = make_config(
        Path("no model"),
        model={"dimensions": DIMENSIONS, "lora": lora},
        policy={
            "param_dtype": "bfloat16",
            "activation_checkpointing": again,
            "microbatch_tokens": 8192,
        },
        rollout={"sampling.max_response_tokens": 1024, "sampling.max_context_tokens": 8192},
    )
    sizes = measure_model(resolve_model_config(config.model), config.model.lora)
    (training,) = [phase for phase in phases(config, sizes, 8) if phase.name == "training"]
    other = ("context", "engine weights", "KV cache", "fragmentation")
    tensors = sum(size for name, size in training.parts.items() if name not in other)
    traced = trace(config, 8)
    print(f"LoRA {lora}, checkpointing {again}: {tensors / traced.peak:.3f} of the trace", traced)
    assert traced.peak < tensors < 1.2 * traced.peak


def test_the_default_micro_batch_of_a_trace_is_nearly_full(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, policy={"microbatch_tokens": 3000}, rollout={"sampling.max_context_tokens": 512}
    )
    tokens = full_batch(config).input_ids.numel()
    assert 2700 < tokens <= 3000
