"""Map parameters of megatron-core to the Hugging Face tensors that they are made of, by family.

    Hugging Face, whole                       megatron-core, tensor parallelism of 2

    q_proj  | g0 | g1 | g2 | g3 |  rows       rank 0  linear_qkv | q0 k0 v0 | q1 k1 v1 |  "grouped"
    k_proj  | g0 | g1 | g2 | g3 |  by group   rank 1             | q2 k2 v2 | q3 k3 v3 |
    v_proj  | g0 | g1 | g2 | g3 |

    gate_proj  | a | b |  rows                rank 0  linear_fc1 | gate a | up a |        "stacked"
    up_proj    | a | b |                      rank 1             | gate b | up b |

    down_proj  | a | b |  columns             rank 0  linear_fc2 | a |                    "one"
                                              rank 1             | b |

A pipeline stage has whole layers, an expert-parallel rank whole experts; every tensor-parallel rank
has the norms and routers.

Tensor parallelism cuts every Hugging Face tensor into equal shards along one dimension, and a
rank's parameter consists of its own shards. So a shard is read, sent and saved without its
neighbours, and loading never needs a whole parameter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from spiral_mega.errors import UserError
from spiral_mega.models.tensor_names import EMBEDDING, HEAD

Fusion = Literal["one", "stacked", "grouped"]


@dataclass(frozen=True, slots=True)
class ParamMapping:
    """Parameter `megatron_name` of megatron-core consists of the Hugging Face tensors `hf_names`.

    `shard_dim`: the dimension along which tensor parallelism cuts each of them; None if every rank
    has them whole. `fusion` of the shards: `one`, `stacked` by rows (gate, up), or `grouped` (q, k,
    v of each group of heads in turn). Layers and experts are numbered over the whole model.
    """

    megatron_name: str
    hf_names: tuple[str, ...]
    shard_dim: int | None = None
    fusion: Fusion = "one"

    def at(self, **index: int) -> ParamMapping:
        """Fill in {layer} and {expert} in all names."""
        hf_names = tuple(name.format(**index) for name in self.hf_names)
        return replace(self, megatron_name=self.megatron_name.format(**index), hf_names=hf_names)


# transformer-engine's modules hold a norm's weight in the linear behind it, and a rank's experts as
# one module.
_TRANSFORMER_ENGINE_NAMES = {
    r"self_attention\.linear_qkv\.layer_norm_weight": "input_layernorm.weight",
    r"mlp\.linear_fc1\.layer_norm_weight": "pre_mlp_layernorm.weight",
    r"mlp\.experts\.(linear_fc[12])\.weight(\d+)": r"mlp.experts.local_experts.\2.\1.weight",
}


def to_local_name(name: str) -> str:
    """Translate the name of a parameter in transformer-engine's modules to that in megatron-core's
    "local" ones.

    The tables below use the latter. A name that is the same in both is returned unchanged.
    """
    for fused, local in _TRANSFORMER_ENGINE_NAMES.items():
        name = re.sub(rf"\.{fused}$", f".{local}", name)
    return name


class Family(NamedTuple):
    """Mappings of a model family: of the model, each layer, each dense or MoE layer's MLP, and each expert."""

    model: tuple[ParamMapping, ...]
    layer: tuple[ParamMapping, ...]
    dense: tuple[ParamMapping, ...]
    moe: tuple[ParamMapping, ...] = ()
    expert: tuple[ParamMapping, ...] = ()


_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_MEGATRON_EXPERT, _HF_EXPERT = (
    _MEGATRON + "mlp.experts.local_experts.{expert}.",
    _HF + "mlp.experts.{expert}.",
)
_QKV = ("q_proj", "k_proj", "v_proj")

_MODEL = (
    ParamMapping("embedding.word_embeddings.weight", (EMBEDDING,), 0),
    ParamMapping("decoder.final_layernorm.weight", ("model.norm.weight",)),
    ParamMapping("output_layer.weight", (HEAD,), 0),
)
_LAYER = (
    ParamMapping(f"{_MEGATRON}input_layernorm.weight", (f"{_HF}input_layernorm.weight",)),
    ParamMapping(
        f"{_MEGATRON}self_attention.linear_qkv.weight",
        tuple(f"{_HF}self_attn.{proj}.weight" for proj in _QKV),
        0,
        "grouped",
    ),
    ParamMapping(
        f"{_MEGATRON}self_attention.linear_proj.weight", (f"{_HF}self_attn.o_proj.weight",), 1
    ),
    ParamMapping(
        f"{_MEGATRON}pre_mlp_layernorm.weight", (f"{_HF}post_attention_layernorm.weight",)
    ),
)
_QK_NORMS = (
    ParamMapping(
        f"{_MEGATRON}self_attention.q_layernorm.weight", (f"{_HF}self_attn.q_norm.weight",)
    ),
    ParamMapping(
        f"{_MEGATRON}self_attention.k_layernorm.weight", (f"{_HF}self_attn.k_norm.weight",)
    ),
)
_QKV_BIAS = (
    ParamMapping(
        f"{_MEGATRON}self_attention.linear_qkv.bias",
        tuple(f"{_HF}self_attn.{proj}.bias" for proj in _QKV),
        0,
        "grouped",
    ),
)
_DENSE = (
    ParamMapping(
        f"{_MEGATRON}mlp.linear_fc1.weight",
        (f"{_HF}mlp.gate_proj.weight", f"{_HF}mlp.up_proj.weight"),
        0,
        "stacked",
    ),
    ParamMapping(f"{_MEGATRON}mlp.linear_fc2.weight", (f"{_HF}mlp.down_proj.weight",), 1),
)
_MOE = (ParamMapping(f"{_MEGATRON}mlp.router.weight", (f"{_HF}mlp.gate.weight",)),)
_EXPERT = (
    ParamMapping(
        f"{_MEGATRON_EXPERT}linear_fc1.weight",
        (f"{_HF_EXPERT}gate_proj.weight", f"{_HF_EXPERT}up_proj.weight"),
        None,
        "stacked",
    ),
    ParamMapping(f"{_MEGATRON_EXPERT}linear_fc2.weight", (f"{_HF_EXPERT}down_proj.weight",)),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(_MODEL, _LAYER, _DENSE),
    "qwen2": Family(_MODEL, (*_LAYER, *_QKV_BIAS), _DENSE),
    "qwen3": Family(_MODEL, (*_LAYER, *_QK_NORMS), _DENSE),
    "qwen3_moe": Family(_MODEL, (*_LAYER, *_QK_NORMS), _DENSE, _MOE, _EXPERT),
}


def family_of(hf_config: Any) -> Family:
    """Return the mappings for a model of this config.

    Raises UserError for a family that has none.
    """
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise UserError(
            f"model.path leads to a model of type {hf_config.model_type!r}, which policy.backend "
            f"'megatron' does not support (it supports {', '.join(FAMILIES)}): use "
            "policy.backend=fsdp"
        )
    return family


def moe_layer_mask(hf_config: Any) -> list[bool]:
    """Return, for each layer, whether its MLP is a mixture of experts."""
    count = hf_config.num_hidden_layers
    if not FAMILIES[hf_config.model_type].expert:
        return [False] * count
    step, dense = hf_config.decoder_sparse_step, set(hf_config.mlp_only_layers or ())
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(count)]


def param_mappings(hf_config: Any, *, tied: bool) -> list[ParamMapping]:
    """List the mappings of the whole model, in its checkpoint's order.

    A `tied` head maps to the embedding.
    """
    family = family_of(hf_config)
    embedding, norm, head = family.model
    if tied:
        head = replace(head, hf_names=embedding.hf_names)
    mappings = [embedding]
    for layer, is_moe in enumerate(moe_layer_mask(hf_config)):
        mlp = family.moe if is_moe else family.dense
        mappings += [mapping.at(layer=layer) for mapping in (*family.layer, *mlp)]
        for expert in range(hf_config.num_experts if is_moe else 0):
            mappings += [mapping.at(layer=layer, expert=expert) for mapping in family.expert]
    return [*mappings, norm, head]


class ShardRange(NamedTuple):
    """Rows (`dim` 0) or columns (1) [start, stop) of a Hugging Face tensor.

    All of it where `dim` is None.
    """

    dim: int | None
    start: int
    stop: int

    def num_rows(self, shape: Sequence[int]) -> int:
        """Count the rows of this shard of a tensor of that shape."""
        return self.stop - self.start if self.dim == 0 else shape[0]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this shard of a whole tensor, as a view."""
        return (
            tensor
            if self.dim is None
            else tensor.narrow(self.dim, self.start, self.stop - self.start)
        )


def shard_range(mapping: ParamMapping, shape: Sequence[int], rank: int, size: int) -> ShardRange:
    """Return what tensor-parallel `rank` of `size` has of one of the mapping's Hugging Face
    tensors, of that shape.

    If `size` does not divide a vocabulary, the last ranks have fewer rows, as with DTensor.
    """
    dim = mapping.shard_dim
    if dim is None:
        return ShardRange(None, 0, 0)
    step = -(-shape[dim] // size)
    return ShardRange(dim, min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim]))


class RowBlock(NamedTuple):
    """Rows [start, start + rows) of shard number `shard`, which are consecutive in the parameter as well."""

    shard: int
    start: int
    rows: int


def row_blocks(mapping: ParamMapping, rows: Sequence[int], groups: int) -> list[RowBlock]:
    """List the rows of a rank's parameter in order, as blocks of rows of its shards.

    `rows`: of each of its shards. `groups`: how many groups of heads they hold.
    """
    if mapping.fusion != "grouped":
        return [RowBlock(shard, 0, count) for shard, count in enumerate(rows)]
    blocks = []
    for group in range(groups):
        for shard, count in enumerate(rows):
            blocks.append(RowBlock(shard, group * (count // groups), count // groups))
    return blocks


def fuse(shards: Sequence[torch.Tensor], blocks: Sequence[RowBlock]) -> torch.Tensor:
    """Assemble a rank's parameter from its shards."""
    return torch.cat([shards[shard][start : start + rows] for shard, start, rows in blocks])


def unfuse(parameter: torch.Tensor, blocks: Sequence[RowBlock], shard: int) -> torch.Tensor:
    """Extract shard number `shard` from a rank's parameter, without the padding of a vocabulary."""
    lengths = [block.rows for block in blocks]
    parts = torch.split(parameter[: sum(lengths)], lengths)
    return torch.cat(
        [part for part, block in zip(parts, blocks, strict=True) if block.shard == shard]
    )
