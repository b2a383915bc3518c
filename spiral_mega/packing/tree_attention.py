"""Tree attention from blocks of variable length: merged by log-sum-exp, with an exact backward.

A query attends to the keys on its path. The path is cut into blocks whose queries and keys are contiguous rows; their
outputs are merged by log-sum-exp, and the merged output and log-sum-exp give each block its exact gradient. A flat
batch is a forest of single paths: one causal block a sequence, nothing to merge.
"""

from __future__ import annotations

from typing import Any

import torch

from spiral_mega.packing.tree_layout import Blocks, Rows, TreeLayout
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
    """q [Q, Hq, D] of the layout's queries, k, v [T, Hkv, D] of all rows, sinks [Hq] or None -> [Q, Hq, D]."""
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
            share = torch.sigmoid(part_lse - lse[:, rows]).T[..., None]
            merged = out[rows].lerp_(part.to(out.dtype), share)  # in place, if rows is a slice
            if not isinstance(rows, slice):
                out[rows] = merged
            lse[:, rows] = torch.logaddexp(lse[:, rows], part_lse)
        if sinks is not None:  # one more term in every sum of exponentials, with a value of zero
            merged = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
            out, lse = out * (lse - merged).exp().T[..., None], merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.how = varlen, layout, form
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        varlen, layout, form = ctx.how
        dtype = torch.promote_types(q.dtype, torch.float32)

        def gradients(blocks: Blocks) -> Grads:
            rows, cols = blocks.rows, blocks.cols
            return varlen.backward(grad[rows], q[rows], k[cols], v[cols], out[rows], lse[:, rows], blocks, form)

        def add(total: torch.Tensor, place: Rows, part: torch.Tensor) -> None:
            if isinstance(place, slice):
                total[place].add_(part)
            else:
                total.index_add_(0, place, part.to(dtype))

        first, *others = layout.blocks(form.window)
        dq, *of_cols = (x.to(dtype) for x in gradients(first))
        if first.cols == slice(0, len(k)):
            dk, dv = of_cols
        else:
            dk, dv = (torch.zeros(k.shape, dtype=dtype, device=k.device) for _ in of_cols)
            for total, part in zip((dk, dv), of_cols, strict=True):
                add(total, first.cols, part)
        for blocks in others:
            places = blocks.rows, blocks.cols, blocks.cols
            for total, place, part in zip((dq, dk, dv), places, gradients(blocks), strict=True):
                add(total, place, part)
        dsinks = None
        if sinks is not None:
            delta = (grad.to(dtype) * out).sum(-1).T
            dsinks = -((sinks[:, None].to(lse.dtype) - lse).exp() * delta).sum(1).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None
