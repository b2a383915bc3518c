"""Variable-length causal attention without flash-attn: SDPA over groups of segments of like length.

Registered with transformers as "segment_sdpa". It takes the same arguments as the flash-attention kernels, so
the packed forward is one code path on any device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface


def segment_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each segment of query [1, Hq, T, D], key and value [1, Hkv, T, D]; returns [1, T, Hq, D].

    `cu_seq_lens_q` [S + 1] bounds the segments. Raises ValueError for what it does not compute: dropout, soft
    caps, sinks, masks, and sliding windows shorter than a segment.
    """
    bounds = cu_seq_lens_q.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if sliding_window is not None and max(lengths) > sliding_window:
        raise ValueError(
            f"segment_sdpa has no sliding window, and a sequence of {max(lengths)} is over {sliding_window}"
        )
    if dropout or softcap is not None or s_aux is not None or attention_mask is not None:
        raise ValueError("segment_sdpa computes plain causal attention: no dropout, soft cap, sinks or mask")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    output = torch.empty_like(query)
    for members in _groups(lengths):
        width = lengths[members[0]]
        offsets = torch.arange(width, device=query.device)
        starts = torch.tensor([bounds[i] for i in members], device=query.device)
        sizes = torch.tensor([lengths[i] for i in members], device=query.device)
        index = starts[:, None] + offsets
        real = offsets < sizes[:, None]
        # Padding lies behind the real tokens, so causality hides it from them; its own rows are not read.
        index = index.where(real, starts[:, None])
        q, k, v = (x[index].transpose(1, 2) for x in (query, key, value))
        attended = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        output = output.index_put((index[real],), attended.transpose(1, 2)[real])
    return output[None], None


def _groups(lengths: list[int]) -> list[list[int]]:
    """Indices of segments by falling length, each group's shortest more than half of its longest."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and 2 * lengths[i] > lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


AttentionInterface.register("segment_sdpa", segment_sdpa)
