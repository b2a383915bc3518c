"""The modules of our own in megatron-core's layers: tree attention, and an RMSNorm for sequence parallelism."""

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
from spiral_mega.policy.megatron.context_parallel import Share

# Where transformer-engine is not installed, 0.16.1 asks for this name without ever having defined it.
vars(moe_utils).setdefault("te_general_gemm", None)


class RmsNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), computed in float32 and rounded where transformers rounds.

    Under sequence parallelism each rank norms its own rows; the weight says so, and its gradient is summed over ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class TreeParams:
    """What attention has to know of a micro-batch: who sees whom, and the rotation of each row (cos, sin [Q, D]).

    It takes the place of megatron-core's PackedSeqParams, of which the layers read the format only.
    """

    share: Share
    cos: torch.Tensor
    sin: torch.Tensor
    qkv_format: str = "sbhd"


class TreeAttention(nn.Module):
    """Core attention along the paths of token trees, of this rank's heads; rotary embedding by depth included."""

    def __init__(self, config: TransformerConfig, *_: Any, backend: Backend, **__: Any) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.backend, self.form = backend, ScoreMod(config.kv_channels**-0.5)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: TreeParams,
        **__: Any,
    ) -> torch.Tensor:
        """query [Q, 1, Hq, D], key and value [Q, 1, Hkv, D] of this rank's rows -> [Q, 1, Hq * D]."""
        tree = packed_seq_params
        q, k = apply_rotary_pos_emb(query[:, 0], key[:, 0], tree.cos, tree.sin, unsqueeze_dim=1)
        k, v = tree.share.whole_keys(k, value[:, 0])
        out = self.backend(q, k, v, None, tree.share.batch.layout, self.form)
        return out.flatten(1)[:, None]


def decoder_spec(
    config: TransformerConfig, attention: str, virtual_stage: int | None, *, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """A stage's layers of megatron-core's "local" modules or transformer-engine's, with tree attention, and the local
    ones with the norm above. `attention` as in BACKENDS; `virtual_stage`: which of this rank's stages, None where it
    has one."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=transformer_engine, normalization="RMSNorm", vp_stage=virtual_stage
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
