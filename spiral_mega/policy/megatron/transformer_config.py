"""Translate a Hugging Face config to megatron-core's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from spiral_mega.config import Config, MegatronConfig
from spiral_mega.policy.megatron.families import moe_layer_mask


def transformer_config(hf: Any, config: Config) -> TransformerConfig:
    """Return megatron-core's config of the model, with per-token losses and without dropout."""
    layout, policy = config.policy.megatron, config.policy
    dtype = getattr(torch, policy.param_dtype)
    moe_layers = moe_layer_mask(hf)
    experts: dict[str, Any] = {}
    if any(moe_layers):
        experts = {
            "num_moe_experts": hf.num_experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_layer_freq": [int(is_moe) for is_moe in moe_layers],
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": layout.spec == "te",
            "expert_model_parallel_size": layout.expert_parallel,
            "expert_tensor_parallel_size": 1,
        }
    pipeline: dict[str, Any] = {}
    if layout.pipeline_parallel > 1:
        pipeline = {
            "pipeline_model_parallel_layout": _pipeline_layout(hf.num_hidden_layers, layout)
        }
    if layout.virtual_stages > 1:
        # Send one by one: in batches, stages that send to each other at the same time would
        # deadlock.
        pipeline |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    recompute: dict[str, Any] = {}
    if policy.activation_checkpointing:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
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
        # Every weight is read from a file. Initialization must run all the same: it marks the
        # sharded parameters, which the gradient's norm depends on.
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses the line above, even without experts
        calculate_per_token_loss=True,
        **experts,
        **pipeline,
        **recompute,
    )


def _pipeline_layout(layers: int, layout: MegatronConfig) -> list[list[str]]:
    """List what each stage holds, in the order of the model.

    If stages cannot be equal, the first ones have one layer more, since the last has the head.
    """
    count = layout.pipeline_parallel * layout.virtual_stages
    stages = [["decoder"] * ((layers + count - 1 - stage) // count) for stage in range(count)]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def _keep(weight: torch.Tensor) -> torch.Tensor:
    return weight
