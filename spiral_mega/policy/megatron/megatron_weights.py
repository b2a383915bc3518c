"""Weights between Hugging Face checkpoints and the shards of megatron-core, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn

from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.policy.megatron.families import (
    Block,
    Entry,
    Part,
    blocks_of,
    fuse,
    local_name,
    part_of,
    unfuse,
)
from spiral_mega.policy.megatron.parallel_layout import Layout
from spiral_mega.policy.weight_buckets import make_buckets

Value = Callable[[nn.Parameter], torch.Tensor]
Change = Callable[[str, torch.Tensor], torch.Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class CheckpointReader:
    """The tensors of a Hugging Face checkpoint in safetensors, read part by part. Raises ValueError for other forms.

    With `tied` the head's are the embedding's, whatever the files hold.
    """

    def __init__(self, path: str, *, tied: bool) -> None:
        folder = Path(path)
        if not folder.is_dir():
            folder = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.safetensors.index.json"]))
        index = folder / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = [file.name for file in folder.glob("*.safetensors")]
        if not names:
            raise ValueError(f"{folder} holds no .safetensors")
        self._stack = ExitStack()
        files = [self._stack.enter_context(safe_open(folder / name, "pt")) for name in names]
        self._slices = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
        if tied and EMBEDDING in self._slices:
            self._slices[HEAD] = self._slices[EMBEDDING]

    def shape(self, name: str) -> list[int]:
        if name not in self._slices:
            raise ValueError(f"no {name} in its files")
        return self._slices[name].get_shape()

    def read(self, name: str, part: Part) -> torch.Tensor:
        tensor = self._slices[name]
        if part.dim is None:
            return tensor[:]
        return tensor[part.start : part.stop] if part.dim == 0 else tensor[:, part.start : part.stop]

    def close(self) -> None:
        self._stack.close()


class ShardMap:
    """This rank's parameters by the entries of the family's table, and which rank has which part of what.

    Of `parameters` (see named_over_model), each must have an entry. `groups`: of heads on a rank. With `tied` the
    embedding is streamed under the head's name too.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        entries: Sequence[Entry],
        shapes: Callable[[str], Sequence[int]],
        layout: Layout,
        groups: int,
        *,
        tied: bool = False,
    ) -> None:
        self.layout, self.entries, self.groups, self.tied = layout, entries, groups, tied
        self.shapes = {name: tuple(shapes(name)) for entry in self.entries for name in entry.theirs}
        self._firsts = {name: entry.ours for entry in reversed(self.entries) for name in entry.theirs}
        self.owned = [(entry, parameters[entry.ours]) for entry in self.entries if entry.ours in parameters]
        if strange := sorted(parameters.keys() - {entry.ours for entry in entries}):
            raise ValueError(f"no table knows {', '.join(strange)}")
        self._places = {
            name: (entry, parameter, i) for entry, parameter in self.owned for i, name in enumerate(entry.theirs)
        }
        mine = {name: self.part(entry, name) for name, (entry, _, _) in self._places.items()}
        self._senders: dict[str, dict[Part, int]] = {name: {} for name in self.shapes}
        for rank, parts in enumerate(gather_objects(mine)):
            for name, part in parts.items():
                self._senders[name].setdefault(part, rank)

    def load(self, read: Callable[[str, Part], torch.Tensor]) -> None:
        """Fill every parameter of this rank; the padding of the vocabulary with zeros."""
        for entry, parameter in self.owned:
            parts = [read(name, self.part(entry, name)) for name in entry.theirs]
            whole = fuse(parts, self.blocks(entry))
            parameter.data.zero_()
            parameter.data[: len(whole)].copy_(whole)

    def stream(
        self, value: Value, dtype: torch.dtype, bucket_bytes: int, change: Change | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by Hugging Face name, of `value` of each parameter, in `dtype`; a tied head under both names.

        At most `bucket_bytes` are gathered at once, or one tensor if that is larger. `change`, given a tensor's name
        and a rank's part of it, returns what is sent. Collective: every rank must iterate to the end, and gets all.
        """
        for bucket in make_buckets(self.shapes, partial(self._num_bytes, dtype=dtype), bucket_bytes):
            gathered = [(name, *self._send(name, value, dtype, change)) for name in bucket]
            for name, whole, pending in gathered:
                for work, part, buffer in pending:
                    work.wait()
                    if part.dim == 1:
                        whole[:, part.start : part.stop] = buffer
                yield name, whole
                if self.tied and name == EMBEDDING:
                    yield HEAD, whole

    def _send(
        self, name: str, value: Value, dtype: torch.dtype, change: Change | None
    ) -> tuple[torch.Tensor, list[Any]]:
        """The tensor that is being filled, and what it waits for: each part from the rank that sends it."""
        device = self.owned[0][1].device
        whole = torch.empty(self.shapes[name], dtype=dtype, device=device)
        mine: torch.Tensor | None = None
        if dist.get_rank() in self._senders[name].values():
            entry, parameter, i = self._places[name]
            mine = unfuse(value(parameter), self.blocks(entry), i)
            mine = mine if change is None else change(name, mine)
        pending = []
        for part, sender in self._senders[name].items():
            buffer = whole if part.dim is None else whole[part.start : part.stop]
            if part.dim == 1:  # columns travel as a block of their own
                buffer = torch.empty(whole.shape[0], part.stop - part.start, dtype=dtype, device=device)
            if not buffer.numel():
                continue
            if sender == dist.get_rank():
                assert mine is not None
                buffer.copy_(mine)
            pending.append((dist.broadcast(buffer, sender, async_op=True), part, buffer))
        return whole, pending

    def _num_bytes(self, name: str, dtype: torch.dtype) -> int:
        return torch.Size(self.shapes[name]).numel() * dtype.itemsize

    def is_first(self, entry: Entry, name: str) -> bool:
        """Whether `entry` is what gives `name` to others; a tied head's copy on the last stage is not."""
        return self._firsts[name] == entry.ours

    def part(self, entry: Entry, name: str) -> Part:
        """What this rank has of the Hugging Face tensor `name`, one of `entry.theirs`."""
        return part_of(entry, self.shapes[name], self.layout.tensor_rank, self.layout.tensor_size)

    def blocks(self, entry: Entry) -> list[Block]:
        """The rows of this rank's parameter in order."""
        return blocks_of(entry, [self.part(entry, n).rows(self.shapes[n]) for n in entry.theirs], self.groups)


def named_over_model(
    stages: Sequence[Any], layout: Layout, named: Callable[[Any], Iterable[tuple[str, Any]]]
) -> dict[str, Any]:
    """What `named` finds in each of a rank's stages (parameters, or modules), by the names of the tables: layers and
    experts are numbered over the whole model, not over this rank."""
    found = {}
    for stage in stages:
        layers = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(stage.decoder.layers)}
        for name, each in named(stage):
            words = local_name(name).split(".")
            if words[:2] == ["decoder", "layers"] and len(words) > 2:
                words[2] = layers[words[2]]
            if "local_experts" in words[:-1]:
                at = words.index("local_experts") + 1
                experts = stage.config.num_moe_experts // layout.expert_size
                words[at] = str(int(words[at]) + layout.expert_rank * experts)
            found[".".join(words)] = each
    return found
