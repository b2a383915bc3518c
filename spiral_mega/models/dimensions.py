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
from spiral_mega.models.model_config import read_model_config
from spiral_mega.models.tensor_names import EXPERTS_APART


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts of weights, and the shape that decides activations. `layer` is the largest decoder layer's.

    `root`: what belongs to no layer (embedding, head, last norm); a tied head counts once. `linear`: weights of the
    layers' linear maps, which a token is multiplied with (of experts, those that it is sent to). `trained_*`: those
    that are trained (adapters). `sparse` layers have `experts` experts of `expert` weights and width `expert_width`
    each, of which a token takes `experts_per_token`.
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
    sparse: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert: int = 0
    expert_width: int = 0

    @property
    def active(self) -> int:
        """Weights that a token is multiplied with, the head's included."""
        return self.linear + self.vocabulary * self.hidden

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
    """Counts of the model of `config`, by building it without memory. Raises UserError for experts other than those of
    Qwen3-MoE."""
    with init_empty_weights():
        model: Any = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    text = config.get_text_config()
    types = set(model._no_split_modules or [])
    layers = [module for module in model.modules() if type(module).__name__ in types]
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    if not layers or (experts and text.model_type not in EXPERTS_APART):
        raise UserError(f"plan knows dense decoders and Qwen3-MoE; {type(model).__name__} is neither")
    of_experts = [_count_experts(layer) for layer in layers]
    total = _count(model)
    of_layers = sum(map(_count, layers))
    linear = sum(m.weight.numel() for layer in layers for m in layer.modules() if isinstance(m, nn.Linear))
    sparse, taken = sum(map(bool, of_experts)), getattr(text, "num_experts_per_tok", 0) if experts else 0
    expert = max(of_experts) // max(experts, 1)
    linear += sparse * (taken * expert + experts * text.hidden_size)  # and the router
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
        sparse=sparse,
        experts=experts,
        experts_per_token=taken,
        expert=expert,
        expert_width=getattr(text, "moe_intermediate_size", 0) if experts else 0,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_experts(layer: nn.Module) -> int:
    """Weights of a layer's experts, which transformers holds together."""
    return sum(parameter.numel() for name, parameter in layer.named_parameters() if ".experts." in name)


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
