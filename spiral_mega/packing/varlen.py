"""The primitive under tree attention: blocks of attention with their log-sum-exp, forward and backward.

The backward takes the output and log-sum-exp of the whole softmax, of which a block may be a part: with them the
weights of a block are exp(score - lse), and its gradient needs nothing of the other blocks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from spiral_mega.packing.tree_layout import Blocks, Rows

SMALL = 2**13  # scores of a block; fewer take less time than a call does

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """Scores are scale * q k, or softcap * tanh(that / softcap); a query sees the last `window` keys up to its own."""

    scale: float
    softcap: float | None = None
    window: int | None = None


class Varlen(Protocol):
    """q, grad, out [Tq, Hq, D], k, v [Tk, Hkv, D], lse [Hq, Tq]: the rows and columns of `blocks`, in its order."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, form: ScoreForm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """softmax(scores) v within each block, and the log-sum-exp of the scores."""

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, blocks: Blocks, form: ScoreForm,
    ) -> Grads:  # fmt: skip
        """The blocks' share of the gradients of q, k, v, given `grad`, `out` and `lse` of the whole softmax."""


class TorchVarlen:
    """On any device, by torch's CPU flash attention where it has what is asked for, written out where not."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, form: ScoreForm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, cols, (lq, lk) in _alike(blocks, q.device):
            causal, fast = _choose(blocks, lq, lk, form, q)
            inputs = _take(q, rows, lq), _take(k, cols, lk), _take(v, cols, lk)
            if fast:
                o, l = _flash(*inputs, 0.0, causal, scale=form.scale)
            else:
                o, l = _forward(*inputs, form, causal=blocks.causal)
            out[rows] = _put(o).to(q.dtype)
            lse[:, rows] = l.transpose(0, 1).flatten(1)
        return out, lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, blocks: Blocks, form: ScoreForm,
    ) -> Grads:  # fmt: skip
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for rows, cols, (lq, lk) in _alike(blocks, q.device):
            causal, fast = _choose(blocks, lq, lk, form, q)
            inputs = _take(q, rows, lq), _take(k, cols, lk), _take(v, cols, lk)
            g, o = _take(grad, rows, lq), _take(out, rows, lq)
            l = lse[:, rows].reshape(len(lse), -1, lq).transpose(0, 1)
            if fast:
                grads = _flash_backward(g, *inputs, o, l, 0.0, causal, scale=form.scale)
            else:
                grads = _backward(g, *inputs, o, l, form, causal=blocks.causal)
            dq[rows], dk[cols], dv[cols] = (_put(x).to(q.dtype) for x in grads)
        return dq, dk, dv


def _alike(blocks: Blocks, device: torch.device) -> list[tuple[Rows, Rows, tuple[int, int]]]:
    """The blocks by size (Lq, Lk), small ones of one size together: a call costs as much as many of them."""
    by_size = defaultdict(list)
    for (q0, q1), (k0, k1) in zip(pairwise(blocks.bounds_q), pairwise(blocks.bounds_k), strict=True):
        size = q1 - q0, k1 - k0
        by_size[size, q0 if size[0] * size[1] > SMALL else -1].append((q0, k0))
    found: list[tuple[Rows, Rows, tuple[int, int]]] = []
    for ((lq, lk), _), starts in by_size.items():
        if len(starts) == 1:
            ((q0, k0),) = starts
            found.append((slice(q0, q0 + lq), slice(k0, k0 + lk), (lq, lk)))
        else:
            index = torch.tensor(starts, device=device)
            rows, cols = (
                (index[:, i : i + 1] + torch.arange(n, device=device)).flatten() for i, n in ((0, lq), (1, lk))
            )
            found.append((rows, cols, (lq, lk)))
    return found


def _choose(blocks: Blocks, lq: int, lk: int, form: ScoreForm, q: torch.Tensor) -> tuple[bool, bool]:
    """Whether queries see fewer keys than all, and whether torch's kernel does it: its causality starts at the first
    key, which is the same where there are as many keys as queries."""
    causal = blocks.causal and lq > 1
    plain = form.softcap is None and (form.window is None or lk <= form.window)
    return causal, plain and q.device.type == "cpu" and (lq == lk or not causal)


def _take(x: torch.Tensor, rows: Rows, length: int) -> torch.Tensor:
    """Blocks [B, H, length, D] of x [T, H, D]."""
    return x[rows].reshape(-1, length, *x.shape[1:]).transpose(1, 2)


def _put(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _scores(q: torch.Tensor, k: torch.Tensor, form: ScoreForm, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [B, H, Lq, Lk], -inf where unseen, and their derivative by scale * q k."""
    scores = form.scale * q @ k.transpose(-1, -2)
    slope = torch.ones_like(scores)
    if form.softcap is not None:
        bent = torch.tanh(scores / form.softcap)
        scores, slope = form.softcap * bent, 1 - bent * bent
    if causal:
        (lq, lk) = scores.shape[-2:]
        behind = torch.arange(lk - lq, lk, device=q.device)[:, None] - torch.arange(lk, device=q.device)
        unseen = behind < 0 if form.window is None else (behind < 0) | (behind >= form.window)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores, slope


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: ScoreForm, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = _widened(q, k, v)
    scores, _ = _scores(q, k, form, causal=causal)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    form: ScoreForm, *, causal: bool,
) -> Grads:  # fmt: skip
    heads = k.shape[1]
    q, k, v = _widened(q, k, v)
    grad, out = grad.to(q.dtype), out.to(q.dtype)
    scores, slope = _scores(q, k, form, causal=causal)
    weights = (scores - lse[..., None]).exp()
    delta = (grad * out).sum(-1, keepdim=True)
    dscores = form.scale * slope * weights * (grad @ v.transpose(-1, -2) - delta)
    dk, dv = (
        x.reshape(len(x), heads, -1, *x.shape[2:]).sum(2)
        for x in (dscores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad)
    )
    return dscores @ k, dk, dv


def _widened(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Grads:
    """In float32 at least, each query head with a key head of its own."""
    dtype, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    return q.to(dtype), k, v
