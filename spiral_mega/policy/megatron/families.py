"""Which tensors of a Hugging Face checkpoint make up which parameter of megatron-core, family by family.

Tensor parallelism cuts every Hugging Face tensor into equal parts along one dimension; a rank's parameter is made of
its own parts. So a part is read, sent and saved without its neighbours, and loading never needs a whole parameter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from spiral_mega.errors import UserError

Fusion = Literal["one", "stacked", "grouped"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Parameter `ours` of megatron-core from the Hugging Face tensors `theirs`.

    `dim`: along which each of `theirs` is cut over tensor-parallel ranks; None: every rank has the whole. `fusion` of
    the parts: `one`, `stacked` by rows (gate, up), or `grouped`: q, k, v of each group of heads in turn. Layers and
    experts are numbered over the whole model.
    """

    ours: str
    theirs: tuple[str, ...]
    dim: int | None = None
    fusion: Fusion = "one"

    def named(self, **values: int) -> Entry:
        """With {layer} and {expert} filled in."""
        return replace(self, ours=self.ours.format(**values), theirs=tuple(n.format(**values) for n in self.theirs))


# transformer-engine's modules hold a norm's weight in the product behind it, and a rank's experts as one module.
_OF_TRANSFORMER_ENGINE = {
    r"self_attention\.linear_qkv\.layer_norm_weight": "input_layernorm.weight",
    r"mlp\.linear_fc1\.layer_norm_weight": "pre_mlp_layernorm.weight",
    r"mlp\.experts\.(linear_fc[12])\.weight(\d+)": r"mlp.experts.local_experts.\2.\1.weight",
}


def local_name(name: str) -> str:
    """The name under which megatron-core's local modules, and so the tables, have parameter `name`."""
    for theirs, ours in _OF_TRANSFORMER_ENGINE.items():
        name = re.sub(rf"\.{theirs}$", f".{ours}", name)
    return name


class Family(NamedTuple):
    """The tables of a model family: once, in each layer, in each dense or expert layer's MLP, for each expert."""

    model: tuple[Entry, ...]
    layer: tuple[Entry, ...]
    dense: tuple[Entry, ...]
    sparse: tuple[Entry, ...] = ()
    expert: tuple[Entry, ...] = ()


_L, _M = "decoder.layers.{layer}.", "model.layers.{layer}."
_QKV = ("q_proj", "k_proj", "v_proj")

_MODEL = (
    Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), 0),
    Entry("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Entry("output_layer.weight", ("lm_head.weight",), 0),
)
_LAYER = (
    Entry(f"{_L}input_layernorm.weight", (f"{_M}input_layernorm.weight",)),
    Entry(f"{_L}self_attention.linear_qkv.weight", tuple(f"{_M}self_attn.{n}.weight" for n in _QKV), 0, "grouped"),
    Entry(f"{_L}self_attention.linear_proj.weight", (f"{_M}self_attn.o_proj.weight",), 1),
    Entry(f"{_L}pre_mlp_layernorm.weight", (f"{_M}post_attention_layernorm.weight",)),
)
_QK_NORMS = (
    Entry(f"{_L}self_attention.q_layernorm.weight", (f"{_M}self_attn.q_norm.weight",)),
    Entry(f"{_L}self_attention.k_layernorm.weight", (f"{_M}self_attn.k_norm.weight",)),
)
_QKV_BIAS = (
    Entry(f"{_L}self_attention.linear_qkv.bias", tuple(f"{_M}self_attn.{n}.bias" for n in _QKV), 0, "grouped"),
)
_DENSE = (
    Entry(f"{_L}mlp.linear_fc1.weight", (f"{_M}mlp.gate_proj.weight", f"{_M}mlp.up_proj.weight"), 0, "stacked"),
    Entry(f"{_L}mlp.linear_fc2.weight", (f"{_M}mlp.down_proj.weight",), 1),
)
_SPARSE = (Entry(f"{_L}mlp.router.weight", (f"{_M}mlp.gate.weight",)),)
_O, _T = _L + "mlp.experts.local_experts.{expert}.", _M + "mlp.experts.{expert}."
_EXPERT = (
    Entry(f"{_O}linear_fc1.weight", (f"{_T}gate_proj.weight", f"{_T}up_proj.weight"), None, "stacked"),
    Entry(f"{_O}linear_fc2.weight", (f"{_T}down_proj.weight",)),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(_MODEL, _LAYER, _DENSE),
    "qwen2": Family(_MODEL, (*_LAYER, *_QKV_BIAS), _DENSE),
    "qwen3": Family(_MODEL, (*_LAYER, *_QK_NORMS), _DENSE),
    "qwen3_moe": Family(_MODEL, (*_LAYER, *_QK_NORMS), _DENSE, _SPARSE, _EXPERT),
}


def family_of(hf_config: Any) -> Family:
    """The tables for a model of this config; UserError for a family without."""
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise UserError(
            f"model.path leads to a model of type {hf_config.model_type!r}, which policy.backend 'megatron' does not "
            f"know (it knows {', '.join(FAMILIES)}): use policy.backend=fsdp"
        )
    return family


def sparse_layers(hf_config: Any) -> list[bool]:
    """For each layer, whether its MLP is a mixture of experts."""
    if not FAMILIES[hf_config.model_type].expert:
        return [False] * hf_config.num_hidden_layers
    step, dense = hf_config.decoder_sparse_step, set(hf_config.mlp_only_layers or ())
    return [(i + 1) % step == 0 and i not in dense for i in range(hf_config.num_hidden_layers)]


def model_entries(hf_config: Any, *, tied: bool) -> list[Entry]:
    """Every entry of the whole model, in the order of its checkpoint. With `tied` the head is made of the embedding."""
    family = family_of(hf_config)
    embedding, norm, head = family.model
    if tied:
        head = replace(head, theirs=embedding.theirs)
    entries = [embedding]
    for layer, sparse in enumerate(sparse_layers(hf_config)):
        entries += [entry.named(layer=layer) for entry in (*family.layer, *(family.sparse if sparse else family.dense))]
        for expert in range(hf_config.num_experts if sparse else 0):
            entries += [entry.named(layer=layer, expert=expert) for entry in family.expert]
    return [*entries, norm, head]


class Part(NamedTuple):
    """Rows or columns [start, stop) along `dim` of a tensor; the whole where `dim` is None."""

    dim: int | None
    start: int
    stop: int

    def rows(self, shape: Sequence[int]) -> int:
        """How many rows the part has of a tensor of that shape."""
        return self.stop - self.start if self.dim == 0 else shape[0]


def part_of(entry: Entry, shape: Sequence[int], rank: int, size: int) -> Part:
    """What rank `rank` of `size` has of one of `theirs`, whose shape is `shape`. Of a vocabulary that `size` does not
    divide the last ranks have fewer rows, as DTensor cuts it."""
    if entry.dim is None:
        return Part(None, 0, 0)
    step = -(-shape[entry.dim] // size)
    return Part(entry.dim, min(rank * step, shape[entry.dim]), min((rank + 1) * step, shape[entry.dim]))


class Block(NamedTuple):
    """Rows [start, start + rows) of the part numbered `part`, which follow one another in the parameter too."""

    part: int
    start: int
    rows: int


def blocks_of(entry: Entry, rows: Sequence[int], groups: int) -> list[Block]:
    """The rows of a rank's parameter in order; `rows`: of each of its parts, `groups`: how many groups of heads."""
    if entry.fusion != "grouped":
        return [Block(i, 0, n) for i, n in enumerate(rows)]
    return [Block(i, g * (n // groups), n // groups) for g in range(groups) for i, n in enumerate(rows)]


def fuse(parts: Sequence[torch.Tensor], blocks: Sequence[Block]) -> torch.Tensor:
    """A rank's parameter from its parts."""
    return torch.cat([parts[i][start : start + rows] for i, start, rows in blocks])


def unfuse(parameter: torch.Tensor, blocks: Sequence[Block], part: int) -> torch.Tensor:
    """The part numbered `part` out of a rank's parameter. What a padded vocabulary has after it is left out."""
    rows = torch.split(parameter[: sum(block.rows for block in blocks)], [block.rows for block in blocks])
    return torch.cat([each for each, block in zip(rows, blocks, strict=True) if block.part == part])
