"""Weights on their way into an engine: checked, and for those that come from a model on disk, read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spiral_mega.models.tensor_names import checkpoint_tensors

Weights = Iterable[tuple[str, torch.Tensor]]


def checked_weights(weights: Weights, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` as they come, each compared with `shapes`. Raises ValueError for a tensor that is unknown or of another
    shape when it comes, and for what is missing at the end."""
    missing = set(shapes)
    for name, tensor in weights:
        if shapes.get(name) != tensor.shape:
            expected = tuple(shapes[name]) if name in shapes else "no such tensor"
            raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}; the engine has {expected}")
        missing.discard(name)
        yield name, tensor
    if missing:
        raise ValueError(f"weights were not sent: {', '.join(sorted(missing))}")


def weight_shapes(path: str) -> dict[str, torch.Size]:
    """The shape of every tensor in a checkpoint of the model at `path`, the head's also where it is tied."""
    return {name: tensor.shape for name, tensor in _tensors(meta_model(path))}


def meta_model(path: str) -> Any:
    """The model at `path` without weights: a transformers causal model on torch's meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def pretrained_weights(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors of the model at `path` by Hugging Face name, a tied head as a tensor of its own."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    yield from _tensors(model)


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = ((name, each.detach()) for name, each in model.named_parameters(remove_duplicate=False))
    return checkpoint_tensors(model.config.model_type, parameters)
