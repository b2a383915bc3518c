"""Weights in megatron-core's own distributed checkpoints (megatron.core.dist_checkpointing, torch_dist).

Such a checkpoint is one of torch.distributed.checkpoint, with the names of GPTModel.sharded_state_dict. Parameters are
stored whole, as without tensor parallelism: q, k and v group by group, gate above up. Layers are stacked along a first
axis (or, in other versions, numbered), experts along the next. megatron-core need not be installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from spiral_mega.conversion.checks import VOCABULARY
from spiral_mega.conversion.dcp import Checkpoint, Piece, write_pieces
from spiral_mega.conversion.sources import BLOCK_BYTES, Source
from spiral_mega.errors import UserError
from spiral_mega.models.safetensors_files import Form, shorten
from spiral_mega.policy.megatron.families import Entry, blocks_of, model_entries, sparse_layers, unfuse

CONFIG, COMMON = "metadata.json", "common.pt"
PADDING = 128  # rows, for each rank that a vocabulary was cut over: Megatron's default make_vocab_size_divisible_by
LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
NOT_THE_MODEL = ("optimizer.", "chained_", "rng_state", "rerun_state")
# What a parameter of a layer is stored as: its own name, or that which transformer-engine's fused modules would have.
STORED_AS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def is_megatron(folder: Path) -> bool:
    return (folder / CONFIG).exists() and (folder / COMMON).exists()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter stands in a checkpoint: in the tensor `key`, at the indices `first` of its leading axes; from
    row `row` on, where only a part of the parameter does."""

    key: str
    first: tuple[int, ...]
    row: int = 0


class MegatronSource:
    """The model in `folder` by Hugging Face names; `shapes` are those that its config calls for.

    Raises UserError, naming keys, for a checkpoint of another model, and for a vocabulary with more rows than padding
    explains; `notes` tells of the padding that is left out.
    """

    def __init__(self, folder: Path, hf_config: Any, shapes: Mapping[str, torch.Size], *, tied: bool) -> None:
        self.folder, self.notes = folder, list[str]()
        settings = json.loads((folder / CONFIG).read_text())
        if settings.get("sharded_backend") != "torch_dist":
            raise UserError(
                f"{folder} is of megatron-core's format {settings.get('sharded_backend')!r}: save it as torch_dist"
            )
        self._checkpoint = Checkpoint(folder)
        self._config = hf_config
        self._groups, self._sparse = hf_config.num_key_value_heads, any(sparse_layers(hf_config))
        self._shapes = shapes
        self._parts: dict[str, tuple[Entry, int]] = {}
        self._places: dict[str, Place] = {}
        self._last: tuple[str, torch.Tensor] | None = None
        missing: list[str] = []
        for entry in model_entries(hf_config, tied=tied):
            if not (tied and entry.ours == "output_layer.weight"):
                missing += self._find(entry)
        used = {place.key for place in self._places.values()}
        strange = [key for key in self._checkpoint.tensors if key not in used and not _ignored(key)]
        problems = [f"it has no {shorten(sorted(missing))}"] if missing else []
        problems += [f"it has {shorten(sorted(strange))}, which the model does not know"] if strange else []
        problems += dict.fromkeys(self._wrong_shapes())
        if problems:
            raise UserError(f"{folder} is not the model that the base's config.json describes: {'; '.join(problems)}")
        self.forms = {
            name: Form(shapes[name], self._checkpoint.tensors[self._places[name].key].properties.dtype)
            for name in self._parts
        }

    def blocks(self, name: str) -> list[range | None]:
        entry, _ = self._parts[name]
        place, rows = self._places[name], self._shapes[name][0]
        if entry.fusion == "grouped":
            return [range(rows)]
        own = range(place.row, place.row + rows)
        clipped = (
            range(max(each.start, own.start) - own.start, min(each.stop, own.stop) - own.start)
            for each in self._checkpoint.row_ranges(place.key, place.first)
        )
        return [each for each in clipped if len(each)]

    def read(self, name: str, rows: range | None) -> torch.Tensor:
        assert rows is not None
        entry, number = self._parts[name]
        place, columns = self._places[name], self._shapes[name][1:]
        if entry.fusion != "grouped":
            return self._read(place, place.row + rows.start, len(rows), columns)
        if self._last is None or self._last[0] != entry.ours:  # q, k and v are asked for one after another
            whole = sum(self._shapes[each][0] for each in entry.theirs)
            self._last = entry.ours, self._read(place, 0, whole, columns)
        return unfuse(self._last[1], self._blocks(entry), number)[rows.start : rows.stop]

    def _read(self, place: Place, row: int, rows: int, columns: torch.Size) -> torch.Tensor:
        offsets, sizes = (*place.first, row, *(0 for _ in columns)), (*(1 for _ in place.first), rows, *columns)
        return self._checkpoint.read(place.key, offsets, sizes).view(rows, *columns)

    def _blocks(self, entry: Entry) -> list[Any]:
        return blocks_of(entry, [self._shapes[name][0] for name in entry.theirs], self._groups)

    def _find(self, entry: Entry) -> list[str]:
        """Note where each of the entry's tensors is; the key of what is nowhere."""
        for key, first in _candidates(entry.ours, self._sparse):
            apart = [f"{key}_{half}" for half in "wv"]  # how newer versions store gate and up
            if key in self._checkpoint.tensors:
                row = 0
                for number, name in enumerate(entry.theirs):
                    self._parts[name], self._places[name] = (entry, number), Place(key, first, row)
                    row += self._shapes[name][0]
                return []
            if entry.fusion == "stacked" and all(each in self._checkpoint.tensors for each in apart):
                for number, (name, each) in enumerate(zip(entry.theirs, apart, strict=True)):
                    self._parts[name], self._places[name] = (entry, number), Place(each, first)
                return []
        return [next(key for key, _ in _candidates(entry.ours, self._sparse))]

    def _wrong_shapes(self) -> Iterator[str]:
        ends: dict[str, int] = {}
        for name, place in self._places.items():
            ends[place.key] = max(ends.get(place.key, 0), place.row + self._shapes[name][0])
        for name, place in self._places.items():
            stored = self._checkpoint.tensors[place.key]
            entry, have = self._parts[name][0], tuple(stored.size)
            rows = sum(self._shapes[n][0] for n in entry.theirs) if entry.fusion == "grouped" else ends[place.key]
            want = (*_counts(self._config, place.key, place.first), rows, *self._shapes[name][1:])
            extra, cuts = have[0] - rows, len({chunk.offsets[0] for chunk in stored.chunks})
            if name.endswith(VOCABULARY) and have[1:] == want[1:] and 0 < extra < PADDING * cuts:
                self.notes.append(f"{place.key}: {extra} rows after the vocabulary's {rows} are padding, left out")
            elif have != want:
                yield f"{place.key} is {have}, by the config {want}"


def _counts(hf_config: Any, key: str, first: tuple[int, ...]) -> tuple[int, ...]:
    """How long the axes are along which `first` counts: layers, experts, or where layers are numbered experts alone."""
    experts = getattr(hf_config, "num_experts", 0)
    if first and key.split(".")[2].isdigit():
        return (experts,)
    return (hf_config.num_hidden_layers, experts)[: len(first)]


def _ignored(key: str) -> bool:
    return key.startswith(NOT_THE_MODEL) or "_extra_state" in key


def _candidates(ours: str, sparse: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys under which a checkpoint may hold a parameter, and where along its leading axes; the first is what we write:
    that of a model by transformer-engine, whose norm before experts (`sparse`) is no part of a linear."""
    words = ours.split(".")
    if words[:2] != ["decoder", "layers"]:
        yield ours, ()
        return
    layer, rest = int(words[2]), words[3:]
    expert: tuple[int, ...] = ()
    if "local_experts" in rest:
        at = rest.index("local_experts")
        expert, rest = (int(rest[at + 1]),), [*rest[:at], "experts", *rest[at + 2 :]]
    name = ".".join(rest)
    names = [STORED_AS.get(name, name), name]
    for stored in dict.fromkeys(reversed(names) if sparse and name == "pre_mlp_layernorm.weight" else names):
        yield f"decoder.layers.{stored}", (layer, *expert)
        yield f"decoder.layers.{layer}.{stored}", expert
        if expert:
            apart = stored.replace("experts.experts.", f"experts.experts.{expert[0]}.")
            yield f"decoder.layers.{layer}.{apart}", ()


def _extra_states(hf_config: Any, sparse: bool) -> Iterator[str]:
    """Keys of the extra states that megatron-core's modules ask for, empty or not, and will not load without."""
    layers, experts = hf_config.num_hidden_layers, getattr(hf_config, "num_experts", 0)
    attention = [f"self_attention.{name}" for name in (*LINEAR[:2], "core_attention", "q_layernorm", "k_layernorm")]
    modules = [
        *attention,
        "input_layernorm",
        "pre_mlp_layernorm",
        *([] if sparse else [f"mlp.{n}" for n in LINEAR[2:]]),
    ]
    yield "decoder.final_layernorm._extra_state/shard_0_1"
    for layer in range(layers):
        for module in modules:
            yield f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"
        for expert, name in product(range(experts if sparse else 0), LINEAR[2:]):
            yield f"decoder.layers.mlp.experts.experts.{name}._extra_state/shard_{layer}.{expert}_{layers}.{experts}"


def write_megatron(source: Source, forms: Mapping[str, Form], hf_config: Any, *, tied: bool, folder: Path) -> None:
    """Write the tensors of `forms`, in their types, as megatron-core loads them into a GPTModel of any layout."""
    sparse = sparse_layers(hf_config)
    if any(sparse) and not all(sparse):
        raise UserError("a model of which only some layers have experts is not written for megatron-core: not built")
    pieces = []
    for entry in model_entries(hf_config, tied=tied):
        if tied and entry.ours == "output_layer.weight":
            continue
        key, first = next(_candidates(entry.ours, all(sparse)))
        rows = [forms[name].shape[0] for name in entry.theirs]
        shape, dtype = forms[entry.theirs[0]].shape, forms[entry.theirs[0]].dtype
        form = Form(torch.Size([*_counts(hf_config, key, first), sum(rows), *shape[1:]]), dtype)
        row = 0
        for part, start, count in blocks_of(entry, rows, hf_config.num_key_value_heads):
            name = entry.theirs[part]
            step = max(1, BLOCK_BYTES * forms[name].shape[0] // max(1, forms[name].nbytes))
            for low in range(start, start + count, step):
                high = min(low + step, start + count)
                offsets = (*first, row + low - start, *(0 for _ in shape[1:]))
                sizes = (*(1 for _ in first), high - low, *shape[1:])
                pieces.append(Piece(key, form, offsets, sizes, partial(source.read, name, range(low, high))))
            row += count
    write_pieces(pieces, folder, objects={key: [None] for key in _extra_states(hf_config, all(sparse))})
    settings = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / CONFIG).write_text(json.dumps(settings | {"common_backend": "torch", "common_backend_version": 1}))
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / COMMON)
