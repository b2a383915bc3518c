"""Count a model's weights, from its config alone, for estimates of memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from spiral_mega.config import LoraConfig
from spiral_mega.errors import UserError
from spiral_mega.models.tensor_names import MOE_TYPES


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Counts of weights ("params"), and the shape that decides the size of activations.

    `layer_params`: of the largest decoder layer. `root_params`: outside of all layers (embedding,
    head, last norm); a tied head counts once. `linear_params`: of the layers' linear maps that one
    token is multiplied with (of experts, those that it is routed to). `trained_*`: weights that are
    trained; of adapters only these. Each of `moe_layers` layers has `experts` experts of
    `expert_params` weights and width `expert_intermediate`, and routes a token to
    `experts_per_token` of them.
    """

    params: int
    layer_params: int
    layers: int
    root_params: int
    linear_params: int
    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool  # queries and keys are normalized, as in Qwen3
    tied: bool
    trained_params: int
    trained_layer_params: int
    trained_root_params: int
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0
    expert_intermediate: int = 0

    @property
    def active_params(self) -> int:
        """Weights that one token is multiplied with, the head's included."""
        return self.linear_params + self.vocabulary * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values, with two bytes for each number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


def measure_model(config: PretrainedConfig, lora: LoraConfig | None) -> ModelSizes:
    """Build the model of `config` without memory and count its weights, and those of adapters as
    `lora` describes.

    Raises UserError for a model without decoder layers, and for experts other than those of
    Qwen3-MoE.
    """
    with init_empty_weights():
        model: Any = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    text = config.get_text_config()
    layer_types = set(model._no_split_modules or [])
    layers = [module for module in model.modules() if type(module).__name__ in layer_types]
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    if not layers or (experts and text.model_type not in MOE_TYPES):
        raise UserError(
            f"plan supports dense decoders and Qwen3-MoE; {type(model).__name__} is neither"
        )
    layer_params = [_count(layer) for layer in layers]
    expert_weights = [_count_experts(layer) for layer in layers]
    moe_layers = sum(count > 0 for count in expert_weights)
    expert_params = max(expert_weights) // max(experts, 1)
    experts_per_token = getattr(text, "num_experts_per_tok", 0) if experts else 0
    moe_params_per_layer = (
        experts_per_token * expert_params + experts * text.hidden_size
    )  # and the router
    total = _count(model)
    trained = _count_trained(model, layers, lora)
    heads = text.num_attention_heads
    return ModelSizes(
        params=total,
        layer_params=max(layer_params),
        layers=len(layers),
        root_params=total - sum(layer_params),
        linear_params=sum(map(_count_linear, layers)) + moe_layers * moe_params_per_layer,
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", heads),
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        qk_norm=any(name.endswith("q_norm") for name, _ in layers[0].named_modules()),
        tied=bool(text.tie_word_embeddings),
        trained_params=trained.total,
        trained_layer_params=trained.layer,
        trained_root_params=trained.root,
        moe_layers=moe_layers,
        experts=experts,
        experts_per_token=experts_per_token,
        expert_params=expert_params,
        expert_intermediate=getattr(text, "moe_intermediate_size", 0) if experts else 0,
    )


def itemsize(name: str) -> int:
    """Return the bytes of one number of the dtype of that name, such as policy.param_dtype."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize


class _Trained(NamedTuple):
    total: int
    layer: int  # the largest
    root: int


def _count_trained(
    model: nn.Module,
    layers: Sequence[nn.Module],
    lora: LoraConfig | None,
) -> _Trained:
    if lora is None:
        total, by_layer = _count(model), [_count(layer) for layer in layers]
    else:
        total, by_layer = (
            _count_adapters(model, lora),
            [_count_adapters(layer, lora) for layer in layers],
        )
    return _Trained(total, max(by_layer), total - sum(by_layer))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_linear(layer: nn.Module) -> int:
    return sum(module.weight.numel() for module in layer.modules() if isinstance(module, nn.Linear))


def _count_experts(layer: nn.Module) -> int:
    """Count the weights of a layer's experts, which transformers fuses."""
    return sum(
        parameter.numel() for name, parameter in layer.named_parameters() if ".experts." in name
    )


def _count_adapters(module: nn.Module, lora: LoraConfig) -> int:
    count = 0
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear) and name.rpartition(".")[2] in lora.targets:
            count += lora.rank * (linear.in_features + linear.out_features)
    return count
