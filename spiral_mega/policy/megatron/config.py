"""megatron-core's configuration of a Hugging Face model, and what of it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from spiral_mega.config import Config, MegatronConfig
from spiral_mega.errors import ConfigError
from spiral_mega.policy.megatron.families import family_of, sparse_layers


def check_layout(hf_config: Any, config: Config, world_size: int) -> None:
    """Raise ConfigError, before anything is loaded, for a model or a number of ranks that the layout does not fit."""
    family_of(hf_config)
    if problems := list(_problems(hf_config, config.policy.megatron, world_size)):
        raise ConfigError("\n".join(f"policy.megatron: {problem}" for problem in problems))


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


def transformer_config(hf: Any, config: Config) -> TransformerConfig:
    """What megatron-core is to build, per-token losses and all; nothing is dropped out."""
    layout, policy = config.policy.megatron, config.policy
    dtype = getattr(torch, policy.param_dtype)
    sparse = sparse_layers(hf)
    experts: dict[str, Any] = {}
    if any(sparse):
        experts = {
            "num_moe_experts": hf.num_experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_layer_freq": [int(kind) for kind in sparse],
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": layout.spec == "te",
            "expert_model_parallel_size": layout.expert_parallel,
            "expert_tensor_parallel_size": 1,
        }
    pipeline: dict[str, Any] = {}
    if layout.pipeline_parallel > 1:
        pipeline = {"pipeline_model_parallel_layout": _stages(hf.num_hidden_layers, layout)}
    if layout.virtual_stages > 1:
        # Messages one by one: in batches, stages that send to each other at once would wait for each other.
        pipeline |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    recompute: dict[str, Any] = {}
    if policy.activation_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.model_type.startswith("qwen3"),
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        tensor_model_parallel_size=layout.tensor_parallel,
        context_parallel_size=layout.context_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        sequence_parallel=layout.sequence_parallel and layout.tensor_parallel > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Every weight is read from a file. Left out altogether, initialization would not mark the parameters as cut,
        # and the gradient's norm would be wrong.
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses the line above, even where there are no experts
        calculate_per_token_loss=True,
        **experts,
        **pipeline,
        **recompute,
    )


def _stages(layers: int, layout: MegatronConfig) -> list[list[str]]:
    """What each stage holds, in the order of the model. The first have a layer more, where they cannot be equal: the
    last has the head."""
    count = layout.pipeline_parallel * layout.virtual_stages
    stages = [["decoder"] * ((layers + count - 1 - stage) // count) for stage in range(count)]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def _keep(weight: torch.Tensor) -> torch.Tensor:
    return weight
