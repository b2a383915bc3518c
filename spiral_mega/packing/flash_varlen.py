"""Block attention by flash-attn's variable-length kernels, in half precision on GPU."""

from __future__ import annotations

from typing import Any

import torch

from spiral_mega.packing.tree_layout import Blocks
from spiral_mega.packing.varlen import Grads, ScoreMod


class FlashVarlen:
    """See spiral_mega.packing.varlen.Varlen. Needs flash-attn 2.7 or later.

    Its causal mask is that of `Blocks`: it ends at the last key.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, score_mod: ScoreMod
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, lse, *_ = _flash_attn_varlen_forward(q, k, v, **_arguments(blocks, score_mod))
        return out, lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, blocks: Blocks, score_mod: ScoreMod,
    ) -> Grads:  # fmt: skip
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        _flash_attn_varlen_backward(
            grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), dq, dk, dv, **_arguments(blocks, score_mod),
            deterministic=False,
        )  # fmt: skip
        return dq, dk, dv


def _arguments(blocks: Blocks, score_mod: ScoreMod) -> dict[str, Any]:
    window = score_mod.window if blocks.causal else None
    return {
        "cu_seqlens_q": blocks.cu_q,
        "cu_seqlens_k": blocks.cu_k,
        "max_seqlen_q": blocks.max_q,
        "max_seqlen_k": blocks.max_k,
        "dropout_p": 0.0,
        "softmax_scale": score_mod.scale,
        "causal": blocks.causal,
        "window_size_left": -1 if window is None else window - 1,
        "window_size_right": 0 if blocks.causal else -1,
        "softcap": score_mod.softcap or 0.0,
        "alibi_slopes": None,
    }
