"""A model's sizes: from its config, or from the dimensions that a configuration carries, so that no hub is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from spiral_mega.config import LoraConfig, ModelConfig
from spiral_mega.errors import UserError
from spiral_mega.policy.model_config import read_model_config


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts of weights, and the shape that decides activations. `layer` is the largest decoder layer's.

    `root`: what belongs to no layer (embedding, head, last norm); a tied head counts once. `linear`: weights of the
    layers' linear maps, which a token is multiplied with. `trained_*`: those that are trained (adapters).
    """

    total: int
    layer: int
    layers: int
    root: int
    linear: int
    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    head_norms: bool  # Qwen3 normalizes queries and keys
    tied: bool
    trained: int
    trained_layer: int
    trained_root: int

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token in two-byte numbers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


def read_dimensions(model: ModelConfig) -> PretrainedConfig:
    """The model's config: of model.dimensions where they are given, else of model.path. Raises UserError."""
    if model.dimensions is None:
        return read_model_config(model.path)
    try:
        return AutoConfig.for_model(**model.dimensions)
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"model.dimensions make no model ({error}): take them from its config.json") from error


def measure(config: PretrainedConfig, lora: LoraConfig | None) -> Sizes:
    """Counts of the model of `config`, by building it without memory. Raises UserError for a mixture of experts."""
    with init_empty_weights():
        model: Any = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    text = config.get_text_config()
    types = set(model._no_split_modules or [])
    layers = [module for module in model.modules() if type(module).__name__ in types]
    if not layers or getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        raise UserError(f"plan knows dense decoders; {type(model).__name__} is none")
    total = _count(model)
    of_layers = sum(map(_count, layers))
    linear = sum(m.weight.numel() for layer in layers for m in layer.modules() if isinstance(m, nn.Linear))
    trained = (total, max(map(_count, layers)), total - of_layers)
    if lora is not None:
        in_layers = [_adapters(layer, lora) for layer in layers]
        root = _adapters(model, lora) - sum(in_layers)
        trained = (sum(in_layers) + root, max(in_layers), root)
    heads = text.num_attention_heads
    return Sizes(
        total=total,
        layer=max(map(_count, layers)),
        layers=len(layers),
        root=total - of_layers,
        linear=linear,
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", heads),
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        head_norms=any(name.endswith("q_norm") for name, _ in layers[0].named_modules()),
        tied=bool(text.tie_word_embeddings),
        trained=trained[0],
        trained_layer=trained[1],
        trained_root=trained[2],
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _adapters(module: nn.Module, lora: LoraConfig) -> int:
    linear = [(n.rpartition(".")[2], m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    return sum(lora.rank * (m.in_features + m.out_features) for name, m in linear if name in lora.targets)


def check_dimensions(given: Mapping[str, Any], config: PretrainedConfig, path: str) -> None:
    """Raise UserError when the model at `path` is not the one that model.dimensions describe."""
    own = config.to_dict()
    wrong = [
        f"{key} is {value!r} in model.dimensions and {own[key]!r} in the model"
        for key, value in given.items()
        if key in own and own[key] != value
    ]
    if wrong:
        raise UserError(f"model.path {path!r} is another model than planned with: {'; '.join(wrong)}")


def itemsize(name: str) -> int:
    """Bytes of a number of policy.param_dtype."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize
