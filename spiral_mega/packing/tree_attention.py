"""Tree attention from blocks of variable length: merged by log-sum-exp, with an exact backward.

A query attends to the keys on its path. The path is cut into blocks whose queries and keys are contiguous rows; their
outputs are merged by log-sum-exp, and the merged output and log-sum-exp give each block its exact gradient. A flat
batch is a forest of single paths: one causal block a sequence, nothing to merge.
"""

from __future__ import annotations

from typing import Any

import torch

from spiral_mega.packing.layout import TreeLayout
from spiral_mega.packing.varlen import Grads, ScoreForm, Varlen


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    varlen: Varlen,
    layout: TreeLayout,
    form: ScoreForm,
) -> torch.Tensor:
    """q [T, Hq, D], k, v [T, Hkv, D], sinks [Hq] or None -> [T, Hq, D]."""
    return _TreeAttention.apply(q, k, v, sinks, varlen, layout, form)  # type: ignore[no-untyped-call]


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        varlen: Varlen, layout: TreeLayout, form: ScoreForm,
    ) -> torch.Tensor:  # fmt: skip
        first, *others = layout.blocks(form.window)
        out, lse = varlen.forward(q, k[first.cols], v[first.cols], first, form)
        if others or sinks is not None:
            out = out.to(torch.promote_types(q.dtype, torch.float32))
        for blocks in others:
            rows, cols = blocks.rows, blocks.cols
            part, part_lse = varlen.forward(q[rows], k[cols], v[cols], blocks, form)
            merged = torch.logaddexp(lse[:, rows], part_lse)
            out[rows] *= _by_row(lse[:, rows] - merged)
            out[rows] += _by_row(part_lse - merged) * part
            lse[:, rows] = merged
        if sinks is not None:  # one more term in every sum of exponentials, with a value of zero
            merged = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
            out, lse = out * _by_row(lse - merged), merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.how = varlen, layout, form
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        varlen, layout, form = ctx.how
        dtype = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        for blocks in layout.blocks(form.window):
            rows, cols = blocks.rows, blocks.cols
            parts: Grads = varlen.backward(grad[rows], q[rows], k[cols], v[cols], out[rows], lse[:, rows], blocks, form)
            dq[rows] += parts[0]
            for total, part in ((dk, parts[1]), (dv, parts[2])):
                if isinstance(cols, slice):
                    total[cols] += part
                else:
                    total.index_add_(0, cols, part.to(dtype))
        dsinks = None
        if sinks is not None:
            delta = (grad.to(dtype) * out).sum(-1).T
            dsinks = -((sinks[:, None].to(lse.dtype) - lse).exp() * delta).sum(1).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


def _by_row(log_weights: torch.Tensor) -> torch.Tensor:
    """exp of [H, T], for rows [T, H, D]."""
    return log_weights.exp().T[..., None]
