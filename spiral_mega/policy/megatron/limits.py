"""Check that a model, a parallel layout and a number of ranks fit together.

This does not need megatron-core to be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from spiral_mega.config import Config, LoraConfig, MegatronConfig
from spiral_mega.errors import ConfigError
from spiral_mega.policy.megatron.families import family_of, moe_layer_mask


def check_layout(hf_config: Any, config: Config, world_size: int) -> None:
    """Raise ConfigError, before anything is loaded, if the layout does not fit the model or the number of ranks."""
    family_of(hf_config)
    layout = config.policy.megatron
    found = [*_layout_problems(hf_config, layout, world_size), *_model_problems(hf_config)]
    problems = [f"policy.megatron: {problem}" for problem in found]
    problems += _lora_problems(hf_config, config.model.lora, layout)
    if problems:
        raise ConfigError("\n".join(problems))


def _layout_problems(hf: Any, layout: MegatronConfig, world_size: int) -> Iterator[str]:
    tensor, pipeline, expert = (
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.expert_parallel,
    )
    context, moe_layers = layout.context_parallel, moe_layer_mask(hf)
    if world_size % (tensor * context * pipeline):
        yield (
            f"tensor_parallel ({tensor}) times context_parallel ({context}) times "
            f"pipeline_parallel ({pipeline}) ranks hold one replica, which does not divide "
            f"{world_size} ranks: change one of them, or the number of ranks"
        )
    elif (world_size // pipeline) % expert:
        yield (
            f"expert_parallel is {expert}, which does not divide the {world_size // pipeline} "
            "ranks of a pipeline stage: choose a divisor"
        )
    sharded = ["num_attention_heads", "num_key_value_heads"]
    if not all(moe_layers):
        sharded.append("intermediate_size")
    for name in sharded:
        count = getattr(hf, name)
        if count % tensor:
            yield f"tensor_parallel is {tensor}, which does not divide the model's {name} ({count}): choose a divisor"
    if layout.spec == "te" and find_spec("transformer_engine") is None:
        yield "spec is 'te', but transformer_engine is not installed: install it, or set spec to local"
    layers = hf.num_hidden_layers
    if layers < pipeline * layout.virtual_stages:
        yield (
            f"pipeline_parallel ({pipeline}) times virtual_stages ({layout.virtual_stages}) is "
            f"more than the model's {layers} layers: choose fewer stages"
        )
    if any(moe_layers):
        yield from _expert_problems(hf.num_experts, layout)
    elif expert > 1:
        yield f"expert_parallel is {expert}, but the model has no experts: set it to 1"


def _model_problems(hf: Any) -> Iterator[str]:
    if set(getattr(hf, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        yield "the model has layers of another attention than full, which is not supported: use policy.backend=fsdp"
    if hf.hidden_act != "silu" or getattr(hf, "mlp_bias", False):
        yield f"the model's MLP ({hf.hidden_act}) is not SiLU without biases: use policy.backend=fsdp"
    if hf.model_type != "qwen2" and getattr(hf, "attention_bias", False):
        yield "the model's attention has biases, which are supported for qwen2 only: use policy.backend=fsdp"


def _expert_problems(experts: int, layout: MegatronConfig) -> Iterator[str]:
    tensor, expert = layout.tensor_parallel, layout.expert_parallel
    if experts % expert:
        yield f"expert_parallel is {expert}, which does not divide the model's {experts} experts: choose a divisor"
    if tensor > 1 and expert == 1:
        yield (
            f"tensor_parallel is {tensor} and expert_parallel 1: each of those ranks would have "
            "every expert, and megatron-core would not sum their gradients: raise expert_parallel, "
            "or set tensor_parallel to 1"
        )
    if tensor > 1 and not layout.sequence_parallel:
        yield (
            "sequence_parallel is false, without which megatron-core does not train experts with "
            "tensor parallelism: leave it out"
        )


def _lora_problems(hf: Any, lora: LoraConfig | None, layout: MegatronConfig) -> Iterator[str]:
    if lora is None:
        return
    expert_targets = sorted({"gate_proj", "up_proj", "down_proj"} & set(lora.targets))
    if any(moe_layer_mask(hf)) and expert_targets:
        yield (
            f"model.lora.targets names {', '.join(expert_targets)}, but the model has experts, "
            "whose adapters no export could hold (transformers and peft treat a layer's experts as "
            "one tensor): leave these out"
        )
    if layout.spec == "te":
        yield (
            "model.lora is set, but with policy.megatron.spec 'te' linears include the norm before "
            "them, so that adapters would not see the linear's input: set spec to local"
        )
    if lora.targets == ["lm_head"] and layout.pipeline_parallel > 1:
        yield (
            "model.lora.targets names lm_head alone, so that only the last stage would be trained: "
            "set policy.megatron.pipeline_parallel=1, or name layers too"
        )
