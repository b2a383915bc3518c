"""Tree attention by FlexAttention, for a GPU without flash-attn. Its block mask skips blocks that no path crosses."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from spiral_mega.packing.tree_layout import TreeLayout
from spiral_mega.packing.varlen import ScoreMod


def attend_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    layout: TreeLayout,
    score_mod: ScoreMod,
) -> torch.Tensor:
    """Attend as `spiral_mega.packing.tree_attention.attend` does, without sinks (ValueError)."""
    if sinks is not None:
        raise ValueError(
            "tree_flex has no attention sinks: install flash-attn, or set policy.attention=tree_torch"
        )

    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        assert score_mod.softcap is not None
        return score_mod.softcap * torch.tanh(score / score_mod.softcap)

    attention = _compiled() if q.device.type == "cuda" else flex_attention
    inputs_1HTD = (x.transpose(0, 1)[None] for x in (q, k, v))
    out_1HTD = attention(
        *inputs_1HTD,
        score_mod=None if score_mod.softcap is None else cap,
        block_mask=_block_mask(layout, score_mod.window),
        scale=score_mod.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out_1HTD[0].transpose(0, 1)


def _block_mask(layout: TreeLayout, window: int | None) -> BlockMask:
    """Return the block mask of the layout's paths, built once for each window."""
    if window not in layout.masks:
        subtree_end_T = torch.from_numpy(layout.subtree_end).to(layout.device)
        depth_T = torch.from_numpy(layout.depth).to(layout.device)
        rows_Q = torch.from_numpy(layout.queries).to(layout.device)

        def on_path(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            row = rows_Q[query]
            seen = (key <= row) & (row < subtree_end_T[key])
            return seen if window is None else seen & (depth_T[row] - depth_T[key] < window)

        num_queries, num_keys = len(layout.queries), len(layout.depth)
        layout.masks[window] = create_block_mask(
            on_path, None, None, num_queries, num_keys, device=str(layout.device)
        )
    return layout.masks[window]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
