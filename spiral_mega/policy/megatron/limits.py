"""What of a model, a layout and a number of ranks does not go together; megatron-core need not be installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from spiral_mega.config import Config, LoraConfig, MegatronConfig
from spiral_mega.errors import ConfigError
from spiral_mega.policy.megatron.families import family_of, sparse_layers


def check_layout(hf_config: Any, config: Config, world_size: int) -> None:
    """Raise ConfigError, before anything is loaded, for a model or a number of ranks that the layout does not fit."""
    family_of(hf_config)
    problems = [f"policy.megatron: {problem}" for problem in _problems(hf_config, config.policy.megatron, world_size)]
    if problems := [*problems, *_lora_problems(hf_config, config.model.lora, config.policy.megatron)]:
        raise ConfigError("\n".join(problems))


def _problems(hf: Any, layout: MegatronConfig, world_size: int) -> Iterator[str]:
    tensor, pipeline, expert = layout.tensor_parallel, layout.pipeline_parallel, layout.expert_parallel
    context, sparse = layout.context_parallel, sparse_layers(hf)
    if world_size % (tensor * context * pipeline):
        yield (
            f"tensor_parallel ({tensor}) times context_parallel ({context}) times pipeline_parallel ({pipeline}) ranks "
            f"hold one replica, which does not divide {world_size} ranks: change one of them, or the number of ranks"
        )
    elif (world_size // pipeline) % expert:
        yield (
            f"expert_parallel is {expert}, which does not divide the {world_size // pipeline} ranks of a pipeline "
            "stage: choose a divisor"
        )
    cut = ["num_attention_heads", "num_key_value_heads", *([] if all(sparse) else ["intermediate_size"])]
    for name in cut:
        if (count := getattr(hf, name)) % tensor:
            yield f"tensor_parallel is {tensor}, which does not divide the model's {name} ({count}): choose a divisor"
    if layout.spec == "te" and find_spec("transformer_engine") is None:
        yield "spec is 'te', but transformer_engine is not installed: install it, or set spec to local"
    if (count := hf.num_hidden_layers) < pipeline * layout.virtual_stages:
        yield (
            f"pipeline_parallel ({pipeline}) times virtual_stages ({layout.virtual_stages}) is more than the model's "
            f"{count} layers: choose fewer stages"
        )
    if any(sparse):
        yield from _expert_problems(hf.num_experts, layout)
    elif expert > 1:
        yield f"expert_parallel is {expert}, but the model has no experts: set it to 1"
    if set(getattr(hf, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        yield "the model has layers of another attention than full, which are not built: use policy.backend=fsdp"
    if hf.hidden_act != "silu" or getattr(hf, "mlp_bias", False):
        yield f"the model's MLP ({hf.hidden_act}) is not SiLU without biases, as is built: use policy.backend=fsdp"
    if hf.model_type != "qwen2" and getattr(hf, "attention_bias", False):
        yield "the model's attention has biases, which are built for qwen2 only: use policy.backend=fsdp"


def _expert_problems(experts: int, layout: MegatronConfig) -> Iterator[str]:
    tensor, expert = layout.tensor_parallel, layout.expert_parallel
    if experts % expert:
        yield f"expert_parallel is {expert}, which does not divide the model's {experts} experts: choose a divisor"
    if tensor > 1 and expert == 1:
        yield (
            f"tensor_parallel is {tensor} and expert_parallel 1: each of those ranks would have every expert, and "
            "megatron-core would not sum their gradients: raise expert_parallel, or set tensor_parallel to 1"
        )
    if tensor > 1 and not layout.sequence_parallel:
        yield (
            "sequence_parallel is false, without which megatron-core does not train experts beside tensor parallelism: "
            "leave it out"
        )


def _lora_problems(hf: Any, lora: LoraConfig | None, layout: MegatronConfig) -> Iterator[str]:
    if lora is None:
        return
    of_experts = sorted({"gate_proj", "up_proj", "down_proj"} & set(lora.targets))
    if any(sparse_layers(hf)) and of_experts:
        yield (
            f"model.lora.targets names {', '.join(of_experts)}, but the model has experts, whose adapters no export "
            "could hold (transformers and peft know a layer's experts as one tensor): leave these out"
        )
    if layout.spec == "te":
        yield (
            "model.lora is set, but with policy.megatron.spec 'te' linears hold the norm before them, so that adapters "
            "would not see what they multiply: set spec to local"
        )
    if lora.targets == ["lm_head"] and layout.pipeline_parallel > 1:
        yield (
            "model.lora.targets names lm_head alone, so that only the last stage would be trained: set "
            "policy.megatron.pipeline_parallel=1, or name layers too"
        )
