"""Modules that replace megatron-core's own: tree attention, and RMSNorm that rounds as transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from spiral_mega.packing.attention import BACKENDS, Backend
from spiral_mega.packing.varlen import ScoreMod
from spiral_mega.policy.megatron.context_parallel import ContextShard

# Without transformer-engine, megatron-core 0.16.1 reads this name but never defines it.
vars(moe_utils).setdefault("te_general_gemm", None)


class RmsNorm(nn.Module):
    """Computes weight * x / sqrt(mean(x^2) + eps) in float32, rounded where transformers rounds.

    Under sequence parallelism each rank normalizes its own rows. The weight is marked for that, so
    that megatron-core sums its gradient over the ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (
            wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        ).to(x.dtype)


@dataclass(frozen=True, slots=True)
class TreeParams:
    """What attention needs to know about a micro-batch: its tree, and the rotation of each row
    (cos, sin [Q, D]).

    Passed in place of megatron-core's PackedSeqParams, of which the layers read only `qkv_format`.
    """

    shard: ContextShard
    cos: torch.Tensor
    sin: torch.Tensor
    qkv_format: str = "sbhd"


class TreeAttention(nn.Module):
    """Core attention along the paths of token trees, for this rank's heads.

    Applies rotary embedding by depth.
    """

    def __init__(self, config: TransformerConfig, *_: Any, backend: Backend, **__: Any) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.backend, self.score_mod = backend, ScoreMod(config.kv_channels**-0.5)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: TreeParams,
        **__: Any,
    ) -> torch.Tensor:
        """Attend from query [Q, 1, Hq, D] to key and value [Q, 1, Hkv, D] of this rank's rows -> [Q, 1, Hq * D]."""
        tree = packed_seq_params
        q, k = apply_rotary_pos_emb(query[:, 0], key[:, 0], tree.cos, tree.sin, unsqueeze_dim=1)
        k, v = tree.shard.all_gather_kv(k, value[:, 0])
        out = self.backend(q, k, v, None, tree.shard.batch.layout, self.score_mod)
        return out.flatten(1)[:, None]


def decoder_spec(
    config: TransformerConfig,
    attention: str,
    virtual_stage: int | None,
    *,
    transformer_engine: bool,
) -> TransformerBlockSubmodules:
    """Specify a stage's layers, with tree attention.

    They are made of transformer-engine's modules, or else of megatron-core's "local" ones with the
    norm above. `attention` is a key of BACKENDS; `virtual_stage` is the number of the stage on this
    rank, None if it is the only one.
    """
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=transformer_engine,
        normalization="RMSNorm",
        vp_stage=virtual_stage,
    )
    for layer in block.layer_specs:
        inner = layer.submodules.self_attention.submodules
        inner.core_attention = partial(TreeAttention, backend=BACKENDS[attention])
        if transformer_engine:
            continue
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
        if config.qk_layernorm:
            inner.q_layernorm = inner.k_layernorm = RmsNorm
    if not transformer_engine:
        block.layer_norm = RmsNorm
    return block
