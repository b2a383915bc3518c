"""Decoding on a plain transformers model: grouped attention, and a cache that grows in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "sdpa_by_group"
MIN_SPARE = 64  # tokens of memory allocated beyond those that are needed


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [B, H, length, D] that are views of buffers with spare memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        old_length = self.get_seq_length()
        length = old_length + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]
        if self._buffers[0].shape[2] < length:
            capacity = length + max(MIN_SPARE, length)
            padding = (0, 0, 0, capacity - old_length)
            self._buffers = [F.pad(buffer[:, :, :old_length], padding) for buffer in self._buffers]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, old_length:length] = states
        return self._view(length)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        length = self.get_seq_length()
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._view(length)

    def _view(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)
        return self.keys, self.values


def growing_cache(config: PretrainedConfig) -> DynamicCache:
    """Return the model's own cache, in which layers that keep every token grow in place."""
    cache = DynamicCache(config=config)
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def attend_by_group(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute what transformers' "sdpa" does, without repeating the cache when W = 1.

    query [B, Hq, W, D], key and value [B, Hkv, S, D] -> [B, W, Hq, D]. For W = 1 the query heads
    that share a key head become that head's queries; "sdpa" would repeat keys and values for each
    of them.
    """
    batch, heads, tokens, width = query.shape
    groups = heads // key.shape[1]
    if tokens > 1 or groups == 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    out = F.scaled_dot_product_attention(
        query.view(batch, key.shape[1], groups, width),
        key,
        value,
        attn_mask=attention_mask,
        scale=kwargs.get("scaling"),
    )
    return out.reshape(batch, 1, heads, -1), None


AttentionInterface.register(ATTENTION, attend_by_group)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
