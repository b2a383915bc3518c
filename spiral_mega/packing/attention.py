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
from spiral_mega.packing.varlen import ScoreForm, TorchVarlen, Varlen

Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, TreeLayout, ScoreForm], torch.Tensor]


def check_model(model: Any) -> None:
    """Raise ValueError for a model whose tokens see each other in ways of which its attention is not told.

    Recurrent or chunked layers would run over the rows of a tree as over one text.
    """
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    strange = set(layer_types) - {"full_attention", "sliding_attention"}
    told = model._supports_attention_backend and model._supports_flash_attn and not model._is_stateful
    if strange or not told:
        reason = f"layers of type {', '.join(sorted(strange))}" if strange else "a state or masks of its own"
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
    """Attend along the paths of `tree`: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D].

    Grouped heads, sliding windows (in tokens of the path), soft caps and sinks are computed; ValueError for dropout, a
    mask, attention in both directions, and a model that does not hand `tree` on.
    """
    if tree is None:
        raise ValueError(f"{type(module).__name__} was given no token tree: its model does not hand on its arguments")
    if dropout or attention_mask is not None or not getattr(module, "is_causal", True):
        raise ValueError("tree attention is causal along each path: no dropout, mask, or attention in both directions")
    form = ScoreForm(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sliding_window)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return backend(q, k, v, s_aux, tree, form)[None], None


def _by_blocks(varlen: Varlen) -> Backend:
    return lambda q, k, v, sinks, tree, form: attend(q, k, v, sinks, varlen, tree, form)


BACKENDS: dict[str, Backend] = {
    "tree_torch": _by_blocks(TorchVarlen()),
    "tree_varlen": _by_blocks(FlashVarlen()),
    "tree_flex": attend_flex,
}
for _name, _backend in BACKENDS.items():
    AttentionInterface.register(_name, partial(tree_attention, backend=_backend))
