"""Tree attention from blocks of variable length, with an exact backward pass.

A query attends to the keys on its path, which several blocks hold (see packing/tree_layout.py):

    forward     out, lse of the first block, which has every query
                for each further block: out, lse <- merge of both by log-sum-exp, for its queries
    backward    each block's gradient from the merged out and lse, added up over the blocks

A flat batch is a forest of single paths: one causal block for each sequence, and nothing to merge.
"""

from __future__ import annotations

from typing import Any

import torch

from spiral_mega.packing.tree_layout import Blocks, Rows, TreeLayout
from spiral_mega.packing.varlen import Grads, ScoreMod, Varlen


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    varlen: Varlen,
    layout: TreeLayout,
    score_mod: ScoreMod,
) -> torch.Tensor:
    """Attend along the paths of `layout`: q [Q, Hq, D] of its queries, k, v [T, Hkv, D] of all rows
    -> [Q, Hq, D].

    `sinks` [Hq] or None: one more score in every softmax of a head, with a value of zero.
    """
    return _TreeAttention.apply(q, k, v, sinks, varlen, layout, score_mod)  # type: ignore[no-untyped-call]


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        varlen: Varlen, layout: TreeLayout, score_mod: ScoreMod,
    ) -> torch.Tensor:  # fmt: skip
        first, *others = layout.blocks(score_mod.window)
        out, lse = varlen.forward(q, k[first.cols], v[first.cols], first, score_mod)
        if others or sinks is not None:
            out = out.to(torch.promote_types(q.dtype, torch.float32))
        for blocks in others:
            part, part_lse = varlen.forward(
                q[blocks.rows], k[blocks.cols], v[blocks.cols], blocks, score_mod
            )
            _merge(out, lse, part, part_lse, blocks.rows)
        if sinks is not None:
            out, lse = _add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.varlen, ctx.layout, ctx.score_mod = varlen, layout, score_mod
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)

        def block_gradients(blocks: Blocks) -> Grads:
            rows, cols = blocks.rows, blocks.cols
            return ctx.varlen.backward(
                grad[rows],
                q[rows],
                k[cols],
                v[cols],
                out[rows],
                lse[:, rows],
                blocks,
                ctx.score_mod,
            )

        first, *others = ctx.layout.blocks(ctx.score_mod.window)
        dq, first_dk, first_dv = (x.to(wide) for x in block_gradients(first))
        if first.cols == slice(0, len(k)):
            dk, dv = first_dk, first_dv
        else:
            dk, dv = (torch.zeros(k.shape, dtype=wide, device=k.device) for _ in range(2))
            _add_rows(dk, first.cols, first_dk)
            _add_rows(dv, first.cols, first_dv)
        for blocks in others:
            block_dq, block_dk, block_dv = block_gradients(blocks)
            _add_rows(dq, blocks.rows, block_dq)
            _add_rows(dk, blocks.cols, block_dk)
            _add_rows(dv, blocks.cols, block_dv)
        dsinks = None if sinks is None else _sinks_gradient(sinks, grad.to(wide), out, lse)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


def _merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, rows: Rows
) -> None:
    """Merge a block's `part` and `part_lse` into those of its queries in `out` [Q, H, D] and `lse` [H, Q], in place."""
    share = torch.sigmoid(part_lse - lse[:, rows]).T[..., None]
    merged = out[rows].lerp_(part.to(out.dtype), share)
    if not isinstance(rows, slice):  # an index copied the rows, a slice is a view
        out[rows] = merged
    lse[:, rows] = torch.logaddexp(lse[:, rows], part_lse)


def _add_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add one term to every sum of exponentials, with a value of zero."""
    total = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
    return out * (lse - total).exp().T[..., None], total


def _sinks_gradient(
    sinks: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    delta = (grad * out).sum(-1).T
    return -((sinks[:, None].to(lse.dtype) - lse).exp() * delta).sum(1).to(sinks.dtype)


def _add_rows(total: torch.Tensor, rows: Rows, part: torch.Tensor) -> None:
    if isinstance(rows, slice):
        total[rows].add_(part)
    else:
        total.index_add_(0, rows, part.to(total.dtype))
