"""Read and write megatron-core's own distributed checkpoints (dist_checkpointing, torch_dist).

Such a checkpoint is one of torch.distributed.checkpoint, with the keys of
GPTModel.sharded_state_dict. Parameters are stored whole, as without tensor parallelism: q, k and v
group by group, gate above up. Layers are stacked along a first axis (or, in other versions,
numbered), experts along the next:

    decoder.layers.self_attention.linear_qkv.weight          [layers, rows, columns]
    decoder.layers.mlp.experts.experts.linear_fc1.weight     [layers, experts, rows, columns]
    decoder.layers.3.self_attention.linear_qkv.weight        [rows, columns]             (numbered)

megatron-core need not be installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spiral_mega.conversion.checks import VOCABULARY
from spiral_mega.conversion.dcp import DcpReader, Piece, write_pieces
from spiral_mega.conversion.sources import BLOCK_BYTES, Source
from spiral_mega.distributed.row_gather import TensorSpec
from spiral_mega.errors import UserError
from spiral_mega.models.safetensors_files import shorten
from spiral_mega.policy.megatron.families import (
    ParamMapping,
    RowBlock,
    moe_layer_mask,
    param_mappings,
    row_blocks,
    unfuse,
)

CONFIG, COMMON = "metadata.json", "common.pt"
# Rows of padding are fewer than this for each rank that a vocabulary was sharded over: Megatron's
# default make_vocab_size_divisible_by.
PADDING = 128
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
ATTENTION_LINEARS, MLP_LINEARS = LINEARS[:2], LINEARS[2:]
NOT_MODEL = ("optimizer.", "chained_", "rng_state", "rerun_state")
OUTPUT_LAYER = "output_layer.weight"
# Keys under which norms of a layer are stored: those that transformer-engine's fused modules give
# them.
STORED_AS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def is_megatron(folder: Path) -> bool:
    return (folder / CONFIG).exists() and (folder / COMMON).exists()


class StoredKey(NamedTuple):
    """A tensor of the checkpoint, and the indices `first` along its leading axes (layer, expert) of a parameter."""

    key: str
    first: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Where a Hugging Face tensor is in the checkpoint.

    It is number `index` of the mapping's tensors, in the parameter at `stored`, and starts at its
    row `row`. If the mapping is `grouped`, its rows are scattered, and `row` does not count.
    """

    mapping: ParamMapping
    index: int
    stored: StoredKey
    row: int


class _FusedParameter(NamedTuple):
    name: str
    value: torch.Tensor


class MegatronSource:
    """The model in `folder` by Hugging Face names; `shapes` are those that its config asks for.

    `notes` mention the padding of a vocabulary that is left out. Raises UserError, naming keys, for
    a checkpoint of another model, and for a vocabulary with more rows than padding explains.
    """

    def __init__(
        self,
        folder: Path,
        hf_config: Any,
        shapes: Mapping[str, torch.Size],
        *,
        tied: bool,
    ) -> None:
        self.folder, self.notes = folder, list[str]()
        settings = json.loads((folder / CONFIG).read_text())
        if settings.get("sharded_backend") != "torch_dist":
            raise UserError(
                f"{folder} is of megatron-core's format {settings.get('sharded_backend')!r}: save "
                "it as torch_dist"
            )
        self._reader = DcpReader(folder)
        self._config, self._shapes = hf_config, shapes
        self._weights: dict[str, StoredWeight] = {}
        self._last_fused: _FusedParameter | None = None
        problems = self._find_weights(tied=tied)
        problems += dict.fromkeys(self._shape_problems())
        if problems:
            raise UserError(
                f"{folder} is not the model that the base's config.json describes: {'; '.join(problems)}"
            )
        self.specs = {}
        for name, weight in self._weights.items():
            dtype = self._reader.tensors[weight.stored.key].properties.dtype
            self.specs[name] = TensorSpec(shapes[name], dtype)

    def blocks(self, name: str) -> list[range | None]:
        weight, rows = self._weights[name], self._shapes[name][0]
        if weight.mapping.fusion == "grouped":
            return [range(rows)]
        blocks: list[range | None] = []
        for stored in self._reader.row_ranges(weight.stored.key, weight.stored.first):
            own = range(max(stored.start - weight.row, 0), min(stored.stop - weight.row, rows))
            if len(own):
                blocks.append(own)
        return blocks

    def read(self, name: str, rows: range | None) -> torch.Tensor:
        assert rows is not None
        weight, columns = self._weights[name], self._shapes[name][1:]
        if weight.mapping.fusion != "grouped":
            return self._read_rows(weight.stored, weight.row + rows.start, len(rows), columns)
        fused = self._read_grouped(weight, columns)
        return unfuse(fused, self._row_blocks(weight.mapping), weight.index)[rows.start : rows.stop]

    def _read_grouped(self, weight: StoredWeight, columns: torch.Size) -> torch.Tensor:
        """Read a layer's q, k and v.

        They are kept until another layer's are read: callers read them in turn.
        """
        name = weight.mapping.megatron_name
        if self._last_fused is None or self._last_fused.name != name:
            rows = self._num_rows(weight.mapping)
            self._last_fused = _FusedParameter(
                name, self._read_rows(weight.stored, 0, rows, columns)
            )
        return self._last_fused.value

    def _read_rows(
        self,
        stored: StoredKey,
        row: int,
        rows: int,
        columns: torch.Size,
    ) -> torch.Tensor:
        offsets = (*stored.first, row, *(0 for _ in columns))
        sizes = (*(1 for _ in stored.first), rows, *columns)
        return self._reader.read(stored.key, offsets, sizes).view(rows, *columns)

    def _row_blocks(self, mapping: ParamMapping) -> list[RowBlock]:
        rows = [self._shapes[name][0] for name in mapping.hf_names]
        return row_blocks(mapping, rows, self._config.num_key_value_heads)

    def _num_rows(self, mapping: ParamMapping) -> int:
        return sum(self._shapes[name][0] for name in mapping.hf_names)

    def _find_weights(self, *, tied: bool) -> list[str]:
        """Locate the model's tensors. Return what is wrong: missing keys and unknown keys."""
        has_experts = any(moe_layer_mask(self._config))
        missing = []
        for mapping in _stored_mappings(self._config, tied=tied):
            candidates = list(_candidate_keys(mapping.megatron_name, has_experts))
            if not any(self._find_weight(mapping, candidate) for candidate in candidates):
                missing.append(candidates[0].key)
        used = {weight.stored.key for weight in self._weights.values()}
        unknown = [key for key in self._reader.tensors if key not in used and _is_of_model(key)]
        problems = []
        if missing:
            problems.append(f"it has no {shorten(sorted(missing))}")
        if unknown:
            problems.append(f"it has {shorten(sorted(unknown))}, which the model does not know")
        return problems

    def _find_weight(self, mapping: ParamMapping, candidate: StoredKey) -> bool:
        """Locate the mapping's tensors at the candidate's key, and return whether they are there."""
        if candidate.key in self._reader.tensors:
            row = 0
            for index, name in enumerate(mapping.hf_names):
                self._weights[name] = StoredWeight(mapping, index, candidate, row)
                row += self._shapes[name][0]
            return True
        halves = [
            f"{candidate.key}_{half}" for half in "wv"
        ]  # how newer versions store gate and up
        if mapping.fusion == "stacked" and all(key in self._reader.tensors for key in halves):
            for index, (name, key) in enumerate(zip(mapping.hf_names, halves, strict=True)):
                self._weights[name] = StoredWeight(
                    mapping, index, StoredKey(key, candidate.first), 0
                )
            return True
        return False

    def _shape_problems(self) -> Iterator[str]:
        """Compare the shapes of stored tensors with the config.

        Note the padding of a vocabulary.
        """
        ends: dict[str, int] = {}
        for name, weight in self._weights.items():
            key = weight.stored.key
            ends[key] = max(ends.get(key, 0), weight.row + self._shapes[name][0])
        for name, weight in self._weights.items():
            key, first = weight.stored
            tensor = self._reader.tensors[key]
            found = tuple(tensor.size)
            rows = (
                self._num_rows(weight.mapping) if weight.mapping.fusion == "grouped" else ends[key]
            )
            expected = (*_leading_sizes(self._config, key, first), rows, *self._shapes[name][1:])
            extra = found[0] - rows
            ranks = len({chunk.offsets[0] for chunk in tensor.chunks})
            if (
                name.endswith(VOCABULARY)
                and found[1:] == expected[1:]
                and 0 < extra < PADDING * ranks
            ):
                self.notes.append(
                    f"{key}: {extra} rows after the vocabulary's {rows} are padding, left out"
                )
            elif found != expected:
                yield f"{key} is {found}, by the config {expected}"


def _stored_mappings(hf_config: Any, *, tied: bool) -> Iterator[ParamMapping]:
    """Mappings of all parameters that a checkpoint stores: not of a tied head."""
    for mapping in param_mappings(hf_config, tied=tied):
        if not (tied and mapping.megatron_name == OUTPUT_LAYER):
            yield mapping


def _leading_sizes(hf_config: Any, key: str, first: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of the axes that `first` indexes: layers, experts, or experts alone if layers are numbered."""
    experts = getattr(hf_config, "num_experts", 0)
    if first and key.split(".")[2].isdigit():
        return (experts,)
    return (hf_config.num_hidden_layers, experts)[: len(first)]


def _is_of_model(key: str) -> bool:
    return not key.startswith(NOT_MODEL) and "_extra_state" not in key


def _candidate_keys(name: str, has_experts: bool) -> Iterator[StoredKey]:
    """Yield keys under which a checkpoint may hold the parameter `name`.

    The first one is the key that is written. That is the key of a model of transformer-engine's
    modules, in which the norm before experts (`has_experts`) is not fused into a linear.
    """
    words = name.split(".")
    if words[:2] != ["decoder", "layers"]:
        yield StoredKey(name, ())
        return
    layer, rest = int(words[2]), words[3:]
    expert: tuple[int, ...] = ()
    if "local_experts" in rest:
        at = rest.index("local_experts")
        expert, rest = (int(rest[at + 1]),), [*rest[:at], "experts", *rest[at + 2 :]]
    local = ".".join(rest)
    fused = STORED_AS.get(local, local)
    own_name_first = has_experts and local == "pre_mlp_layernorm.weight"
    for stored in dict.fromkeys((local, fused) if own_name_first else (fused, local)):
        yield StoredKey(f"decoder.layers.{stored}", (layer, *expert))
        yield StoredKey(f"decoder.layers.{layer}.{stored}", expert)
        if expert:
            numbered = stored.replace("experts.experts.", f"experts.experts.{expert[0]}.")
            yield StoredKey(f"decoder.layers.{layer}.{numbered}", ())


def _extra_state_keys(hf_config: Any, *, has_experts: bool) -> Iterator[str]:
    """Yield keys of the extra states, even empty ones, without which megatron-core's modules do not load."""
    layers, experts = hf_config.num_hidden_layers, getattr(hf_config, "num_experts", 0)
    modules = [
        f"self_attention.{name}"
        for name in (*ATTENTION_LINEARS, "core_attention", "q_layernorm", "k_layernorm")
    ]
    modules += ["input_layernorm", "pre_mlp_layernorm"]
    if not has_experts:
        modules += [f"mlp.{name}" for name in MLP_LINEARS]
    yield "decoder.final_layernorm._extra_state/shard_0_1"
    for layer in range(layers):
        for module in modules:
            yield f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"
        for expert, name in product(range(experts if has_experts else 0), MLP_LINEARS):
            yield f"decoder.layers.mlp.experts.experts.{name}._extra_state/shard_{layer}.{expert}_{layers}.{experts}"


def write_megatron(
    source: Source, specs: Mapping[str, TensorSpec], hf_config: Any, *, tied: bool, folder: Path
) -> None:
    """Write the tensors of `specs`, in these dtypes, as megatron-core loads them into a GPTModel of any layout."""
    moe_layers = moe_layer_mask(hf_config)
    has_experts = all(moe_layers)
    if any(moe_layers) and not has_experts:
        raise UserError(
            "a model of which only some layers have experts cannot be written for megatron-core"
        )
    pieces: list[Piece] = []
    for mapping in _stored_mappings(hf_config, tied=tied):
        stored = next(_candidate_keys(mapping.megatron_name, has_experts))
        pieces += _parameter_pieces(source, specs, hf_config, mapping, stored)
    extra_states = {key: [None] for key in _extra_state_keys(hf_config, has_experts=has_experts)}
    write_pieces(pieces, folder, objects=extra_states)
    settings = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / CONFIG).write_text(json.dumps(settings))
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / COMMON)


def _parameter_pieces(
    source: Source,
    specs: Mapping[str, TensorSpec],
    hf_config: Any,
    mapping: ParamMapping,
    stored: StoredKey,
) -> Iterator[Piece]:
    """Cut the mapping's parameter, to be written at `stored`, into pieces of at most BLOCK_BYTES (or one row)."""
    first_spec = specs[mapping.hf_names[0]]
    columns = first_spec.shape[1:]
    rows = [specs[name].shape[0] for name in mapping.hf_names]
    shape = torch.Size([*_leading_sizes(hf_config, *stored), sum(rows), *columns])
    spec = TensorSpec(shape, first_spec.dtype)
    at = 0  # row of the parameter at which the block starts
    for block in row_blocks(mapping, rows, hf_config.num_key_value_heads):
        name = mapping.hf_names[block.shard]
        for part in _row_parts(block, specs[name]):
            offsets = (*stored.first, at + part.start - block.start, *(0 for _ in columns))
            sizes = (*(1 for _ in stored.first), len(part), *columns)
            yield Piece(stored.key, spec, offsets, sizes, partial(source.read, name, part))
        at += block.rows


def _row_parts(block: RowBlock, spec: TensorSpec) -> Sequence[range]:
    """Cut a block of rows of a tensor of `spec` into ranges of at most BLOCK_BYTES, or one row."""
    step = max(1, BLOCK_BYTES * spec.shape[0] // max(1, spec.nbytes))
    stop = block.start + block.rows
    return [range(low, min(low + step, stop)) for low in range(block.start, stop, step)]
