"""The varlen primitive by flash-attn's kernels, half precision on GPU."""

from __future__ import annotations

from typing import Any

import torch

from spiral_mega.packing.tree_layout import Blocks
from spiral_mega.packing.varlen import Grads, ScoreForm


class FlashVarlen:
    """flash-attn 2.7 and later; see spiral_mega.packing.varlen.Varlen. Its causality is that of `Blocks`: it ends at
    the last key."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, form: ScoreForm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, lse, *_ = _flash_attn_varlen_forward(q, k, v, **_arguments(blocks, form))
        return out, lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, blocks: Blocks, form: ScoreForm,
    ) -> Grads:  # fmt: skip
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        _flash_attn_varlen_backward(
            grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), dq, dk, dv, **_arguments(blocks, form),
            deterministic=False,
        )  # fmt: skip
        return dq, dk, dv


def _arguments(blocks: Blocks, form: ScoreForm) -> dict[str, Any]:
    windowed = blocks.causal and form.window is not None
    return {
        "cu_seqlens_q": blocks.cu_q,
        "cu_seqlens_k": blocks.cu_k,
        "max_seqlen_q": blocks.max_q,
        "max_seqlen_k": blocks.max_k,
        "dropout_p": 0.0,
        "softmax_scale": form.scale,
        "causal": blocks.causal,
        "window_size_left": form.window - 1 if windowed and form.window is not None else -1,
        "window_size_right": 0 if blocks.causal else -1,
        "softcap": form.softcap or 0.0,
        "alibi_slopes": None,
    }
