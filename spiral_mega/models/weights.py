"""Shapes and values of a model's weights, by the names of its checkpoint (tensor_names.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spiral_mega.models.tensor_names import to_checkpoint_names

Weights = Iterable[tuple[str, torch.Tensor]]


def checked_weights(
    weights: Weights,
    shapes: Mapping[str, torch.Size],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights` unchanged, comparing names and shapes with those that the engine expects.

    Raises ValueError for an unknown tensor or a wrong shape as soon as it is seen, and for missing
    tensors at the end.
    """
    missing = set(shapes)
    for name, tensor in weights:
        if shapes.get(name) != tensor.shape:
            expected = tuple(shapes[name]) if name in shapes else "no such tensor"
            raise ValueError(
                f"weight {name} has shape {tuple(tensor.shape)}; the engine has {expected}"
            )
        missing.discard(name)
        yield name, tensor
    if missing:
        raise ValueError(f"weights were not sent: {', '.join(sorted(missing))}")


def weight_shapes(path: str) -> dict[str, torch.Size]:
    """Return the shape of every tensor in a checkpoint of the model at `path`.

    A tied head is listed as well.
    """
    return {name: tensor.shape for name, tensor in _tensors(meta_model(path))}


def meta_model(path: str) -> Any:
    """Build the causal language model at `path` on torch's meta device, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def pretrained_weights(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's whole tensors by checkpoint name; a tied head is a tensor of its own."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    yield from _tensors(model)


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = (
        (name, each.detach()) for name, each in model.named_parameters(remove_duplicate=False)
    )
    return to_checkpoint_names(model.config.model_type, parameters)
