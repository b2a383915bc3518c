"""Attention over blocks of variable length, with their log-sum-exp: the primitive under tree
attention.

A block may be a part of a larger softmax. The backward pass takes the output and the log-sum-exp of
the whole softmax: with them a block's attention weights are exp(score - lse), and its gradient
needs nothing of the other blocks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from spiral_mega.packing.tree_layout import Blocks, Rows

SMALL_BLOCK = 2**13  # scores; a block of fewer takes less time than a kernel call does

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class ScoreMod:
    """Scores are scale * q k, or softcap * tanh(that / softcap); a query sees the last `window` keys up to its own."""

    scale: float
    softcap: float | None = None
    window: int | None = None


class Varlen(Protocol):
    """Attention within blocks.

    q, grad, out [Q, Hq, D], k, v [K, Hkv, D] and lse [Hq, Q] are those of the blocks' rows and
    columns, in their order.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, score_mod: ScoreMod
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return softmax(scores) v within each block, and the log-sum-exp of the scores."""

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, blocks: Blocks, score_mod: ScoreMod,
    ) -> Grads:  # fmt: skip
        """Return the blocks' terms of the gradients of q, k, v, given `grad`, `out` and `lse` of the whole softmax."""


class TorchVarlen:
    """Runs on any device: torch's flash attention for CPU where that covers the blocks, plain operations elsewhere."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, score_mod: ScoreMod
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
        for group in _group_by_size(blocks, q.device):
            rows, cols, size_q, size_k = group
            inputs_BHLD = _take(q, rows, size_q), _take(k, cols, size_k), _take(v, cols, size_k)
            if _flash_covers(group, blocks, score_mod, q.device):
                causal = blocks.causal and size_q > 1
                out_BHLD, lse_BHL = _flash(*inputs_BHLD, 0.0, causal, scale=score_mod.scale)
            else:
                out_BHLD, lse_BHL = _forward(*inputs_BHLD, score_mod, causal=blocks.causal)
            out[rows] = _flatten(out_BHLD).to(q.dtype)
            lse[:, rows] = lse_BHL.transpose(0, 1).flatten(1)
        return out, lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, blocks: Blocks, score_mod: ScoreMod,
    ) -> Grads:  # fmt: skip
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for group in _group_by_size(blocks, q.device):
            rows, cols, size_q, size_k = group
            inputs_BHLD = _take(q, rows, size_q), _take(k, cols, size_k), _take(v, cols, size_k)
            grad_BHLD, out_BHLD = _take(grad, rows, size_q), _take(out, rows, size_q)
            lse_BHL = lse[:, rows].reshape(len(lse), -1, size_q).transpose(0, 1)
            if _flash_covers(group, blocks, score_mod, q.device):
                causal = blocks.causal and size_q > 1
                grads_BHLD = _flash_backward(
                    grad_BHLD, *inputs_BHLD, out_BHLD, lse_BHL, 0.0, causal, scale=score_mod.scale
                )
            else:
                grads_BHLD = _backward(
                    grad_BHLD, *inputs_BHLD, out_BHLD, lse_BHL, score_mod, causal=blocks.causal
                )
            dq[rows], dk[cols], dv[cols] = (_flatten(x).to(q.dtype) for x in grads_BHLD)
        return dq, dk, dv


class _BlockGroup(NamedTuple):
    """Blocks of one size that are computed together: their rows and columns, and the queries and keys of each."""

    rows: Rows
    cols: Rows
    size_q: int
    size_k: int


def _group_by_size(blocks: Blocks, device: torch.device) -> list[_BlockGroup]:
    """Group small blocks of one size: a kernel call takes as long as many of them. Large blocks stay single."""
    starts_by_size = defaultdict(list)
    for (q0, q1), (k0, k1) in zip(
        pairwise(blocks.bounds_q), pairwise(blocks.bounds_k), strict=True
    ):
        size_q, size_k = q1 - q0, k1 - k0
        single = q0 if size_q * size_k > SMALL_BLOCK else -1
        starts_by_size[size_q, size_k, single].append((q0, k0))
    groups = []
    for (size_q, size_k, _), starts in starts_by_size.items():
        if len(starts) == 1:
            q0, k0 = starts[0]
            groups.append(
                _BlockGroup(slice(q0, q0 + size_q), slice(k0, k0 + size_k), size_q, size_k)
            )
        else:
            starts_q, starts_k = torch.tensor(starts, device=device).unbind(1)
            rows = (starts_q[:, None] + torch.arange(size_q, device=device)).flatten()
            cols = (starts_k[:, None] + torch.arange(size_k, device=device)).flatten()
            groups.append(_BlockGroup(rows, cols, size_q, size_k))
    return groups


def _flash_covers(
    group: _BlockGroup, blocks: Blocks, score_mod: ScoreMod, device: torch.device
) -> bool:
    """Return whether torch's flash attention for CPU computes these blocks.

    It has no soft cap and no window. Its causal mask starts at the first key, ours ends at the last
    one: they agree where there are as many keys as queries, and a single query needs none.
    """
    plain = score_mod.softcap is None and (
        score_mod.window is None or group.size_k <= score_mod.window
    )
    same_mask = group.size_q == group.size_k or not blocks.causal or group.size_q == 1
    return plain and same_mask and device.type == "cpu"


def _take(x: torch.Tensor, rows: Rows, size: int) -> torch.Tensor:
    """Take blocks [B, H, size, D] out of x [T, H, D]."""
    return x[rows].reshape(-1, size, *x.shape[1:]).transpose(1, 2)


def _flatten(x_BHLD: torch.Tensor) -> torch.Tensor:
    """Put blocks one after the other, [B * L, H, D]."""
    return x_BHLD.transpose(1, 2).flatten(0, 1)


def _scores(
    q_BHLD: torch.Tensor, k_BHLD: torch.Tensor, score_mod: ScoreMod, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [B, H, Lq, Lk], -inf where unseen, and their derivative by scale * q k."""
    scores = score_mod.scale * q_BHLD @ k_BHLD.transpose(-1, -2)
    slope = torch.ones_like(scores)
    if score_mod.softcap is not None:
        capped = torch.tanh(scores / score_mod.softcap)
        scores, slope = score_mod.softcap * capped, 1 - capped * capped
    if causal:
        (size_q, size_k), device = scores.shape[-2:], scores.device
        distance = torch.arange(size_k - size_q, size_k, device=device)[:, None] - torch.arange(
            size_k, device=device
        )
        unseen = distance < 0
        if score_mod.window is not None:
            unseen = unseen | (distance >= score_mod.window)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores, slope


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: ScoreMod, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = _widen(q, k, v)
    scores, _ = _scores(q, k, score_mod, causal=causal)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    score_mod: ScoreMod, *, causal: bool,
) -> Grads:  # fmt: skip
    num_kv_heads = k.shape[1]
    q, k, v = _widen(q, k, v)
    grad, out = grad.to(q.dtype), out.to(q.dtype)
    scores, slope = _scores(q, k, score_mod, causal=causal)
    weights = (scores - lse[..., None]).exp()
    delta = (grad * out).sum(-1, keepdim=True)
    dscores = score_mod.scale * slope * weights * (grad @ v.transpose(-1, -2) - delta)
    dk = _sum_groups(dscores.transpose(-1, -2) @ q, num_kv_heads)
    dv = _sum_groups(weights.transpose(-1, -2) @ grad, num_kv_heads)
    return dscores @ k, dk, dv


def _sum_groups(x_BHLD: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Sum over the query heads of each key head."""
    return x_BHLD.reshape(len(x_BHLD), num_kv_heads, -1, *x_BHLD.shape[2:]).sum(2)


def _widen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Grads:
    """Cast to at least float32, and repeat each key head for its query heads."""
    dtype, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    return q.to(dtype), k, v
