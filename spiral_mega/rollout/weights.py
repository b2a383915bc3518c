"""Weights for an engine from a model on disk, in the form that a policy streams them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM


def pretrained_weights(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors of the model at `path` by Hugging Face name, a tied head as a tensor of its own."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter.detach()
