"""Tree attention as transformers calls it: "tree_torch", "tree_varlen" and "tree_flex", registered on import."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface

from spiral_mega.packing.flash_varlen import FlashVarlen
from spiral_mega.packing.flex import attend_flex
from spiral_mega.packing.tree_attention import attend
from spiral_mega.packing.tree_layout import TreeLayout
from spiral_mega.packing.varlen import ScoreMod, TorchVarlen, Varlen

Backend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, TreeLayout, ScoreMod],
    torch.Tensor,
]


def check_model(model: Any) -> None:
    """Raise ValueError for a model in which tokens mix in ways that a token tree does not control.

    Recurrent or chunked layers would run over the rows of a tree as if they were one text.
    """
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    plain = (
        model._supports_attention_backend and model._supports_flash_attn and not model._is_stateful
    )
    if unknown or not plain:
        reason = (
            f"layers of type {', '.join(sorted(unknown))}"
            if unknown
            else "a state or masks of its own"
        )
        raise ValueError(f"{type(model).__name__} has {reason}, which token trees cannot follow")


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    backend: Backend,
    tree: TreeLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend along the paths of `tree`: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T,
    Hq, D].

    Supports grouped heads, sliding windows (in tokens of the path), soft caps and sinks. Raises
    ValueError for dropout, a mask, bidirectional attention, and a model that does not pass `tree`
    to its attention.
    """
    if tree is None:
        raise ValueError(
            f"{type(module).__name__} was given no token tree: its model does not pass on its arguments"
        )
    if dropout or attention_mask is not None or not getattr(module, "is_causal", True):
        raise ValueError(
            "tree attention is causal along each path: no dropout, no mask, no bidirectional attention"
        )
    score_mod = ScoreMod(
        query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sliding_window
    )
    q_THD, k_THD, v_THD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return backend(q_THD, k_THD, v_THD, s_aux, tree, score_mod)[None], None


def _blockwise(varlen: Varlen) -> Backend:
    return lambda q, k, v, sinks, tree, score_mod: attend(q, k, v, sinks, varlen, tree, score_mod)


BACKENDS: dict[str, Backend] = {
    "tree_torch": _blockwise(TorchVarlen()),
    "tree_varlen": _blockwise(FlashVarlen()),
    "tree_flex": attend_flex,
}
for _name, _backend in BACKENDS.items():
    AttentionInterface.register(_name, partial(tree_attention, backend=_backend))
