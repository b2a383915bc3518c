"""Tree attention by FlexAttention, for a GPU without flash-attn. Its block mask skips what no path crosses."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from spiral_mega.packing.tree_layout import TreeLayout
from spiral_mega.packing.varlen import ScoreForm


def attend_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    layout: TreeLayout,
    form: ScoreForm,
) -> torch.Tensor:
    """As `spiral_mega.packing.tree_attention.attend`, but without sinks (ValueError)."""
    if sinks is not None:
        raise ValueError("tree_flex has no attention sinks: install flash-attn, or set policy.attention=tree_torch")

    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        assert form.softcap is not None
        return form.softcap * torch.tanh(score / form.softcap)

    attention = _compiled() if q.device.type == "cuda" else flex_attention
    out = attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        score_mod=None if form.softcap is None else cap,
        block_mask=_block_mask(layout, form.window),
        scale=form.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _block_mask(layout: TreeLayout, window: int | None) -> BlockMask:
    if window not in layout.masks:
        end = torch.from_numpy(layout.subtree_end).to(layout.device)
        depth = torch.from_numpy(layout.depth).to(layout.device)
        queries = torch.from_numpy(layout.queries).to(layout.device)

        def on_path(batch: Any, head: Any, query: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            q = queries[query]
            seen = (k <= q) & (q < end[k])
            return seen if window is None else seen & (depth[q] - depth[k] < window)

        sizes = len(layout.queries), len(layout.depth)
        layout.masks[window] = create_block_mask(on_path, None, None, *sizes, device=str(layout.device))
    return layout.masks[window]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
