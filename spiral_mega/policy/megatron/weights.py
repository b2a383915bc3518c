"""Weights between Hugging Face checkpoints and the shards of megatron-core, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn

from spiral_mega.distributed import gather_objects
from spiral_mega.policy.megatron.families import (
    Block,
    Entry,
    Part,
    blocks_of,
    fuse,
    local_name,
    model_entries,
    part_of,
    unfuse,
)
from spiral_mega.policy.megatron.layout import Layout

Value = Callable[[nn.Parameter], torch.Tensor]


class CheckpointReader:
    """The tensors of a Hugging Face checkpoint in safetensors, read part by part. Raises ValueError for other forms."""

    def __init__(self, path: str) -> None:
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
    """This rank's parameters by the entries of the family's table, and which rank has which part of what."""

    def __init__(
        self, stages: list[Any], hf_config: Any, shapes: Callable[[str], Sequence[int]], layout: Layout
    ) -> None:
        self.layout = layout
        self.groups = hf_config.num_key_value_heads // layout.tensor_size
        self.tied = bool(hf_config.tie_word_embeddings)
        parameters = {name: each for stage in stages for name, each in _global_names(stage, layout)}
        self.entries = model_entries(hf_config)
        self.shapes = {name: tuple(shapes(name)) for entry in self.entries for name in entry.theirs}
        self._firsts = {name: entry.ours for entry in reversed(self.entries) for name in entry.theirs}
        self.owned = [(entry, parameters.pop(entry.ours)) for entry in self.entries if entry.ours in parameters]
        if parameters:
            raise ValueError(f"no table knows {', '.join(sorted(parameters))}")
        self._places = {
            name: (entry, parameter, i) for entry, parameter in self.owned for i, name in enumerate(entry.theirs)
        }
        mine = {name: self.part(entry, name) for name, (entry, _, _) in self._places.items()}
        self._senders: dict[str, dict[Part, int]] = {name: {} for name in self.shapes}
        for rank, parts in enumerate(gather_objects(mine)):
            for name, part in parts.items():
                self._senders[name].setdefault(part, rank)

    def load(self, reader: CheckpointReader) -> None:
        """Fill every parameter of this rank; the padding of the vocabulary with zeros."""
        for entry, parameter in self.owned:
            parts = [reader.read(name, self.part(entry, name)) for name in entry.theirs]
            whole = fuse(parts, self.blocks(entry))
            parameter.data.zero_()
            parameter.data[: len(whole)].copy_(whole)

    def stream(self, value: Value, dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by Hugging Face name, of `value` of each parameter, in `dtype`; a tied head under both names.

        At most `bucket_bytes` are gathered at once, or one tensor if that is larger. Collective: every rank must
        iterate to the end, and gets all.
        """
        for bucket in self._buckets(bucket_bytes // dtype.itemsize):
            gathered = [(name, *self._send(name, value, dtype)) for name in bucket]
            for name, whole, pending in gathered:
                for work, part, buffer in pending:
                    work.wait()
                    if part.dim == 1:
                        whole[:, part.start : part.stop] = buffer
                yield name, whole
                if self.tied and name == "model.embed_tokens.weight":
                    yield "lm_head.weight", whole

    def _send(self, name: str, value: Value, dtype: torch.dtype) -> tuple[torch.Tensor, list[Any]]:
        """The tensor that is being filled, and what it waits for: each part from the rank that sends it."""
        device = self.owned[0][1].device
        whole = torch.empty(self.shapes[name], dtype=dtype, device=device)
        mine: torch.Tensor | None = None
        if dist.get_rank() in self._senders[name].values():
            entry, parameter, i = self._places[name]
            mine = unfuse(value(parameter), self.blocks(entry), i)
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

    def _buckets(self, limit: int) -> Iterator[list[str]]:
        bucket: list[str] = []
        filled = 0
        for name, shape in self.shapes.items():
            size = torch.Size(shape).numel()
            if bucket and filled + size > limit:
                yield bucket
                bucket, filled = [], 0
            bucket.append(name)
            filled += size
        if bucket:
            yield bucket

    def is_first(self, entry: Entry, name: str) -> bool:
        """Whether `entry` is what gives `name` to others; a tied head's copy on the last stage is not."""
        return self._firsts[name] == entry.ours

    def part(self, entry: Entry, name: str) -> Part:
        """What this rank has of the Hugging Face tensor `name`, one of `entry.theirs`."""
        return part_of(entry, self.shapes[name], self.layout.tensor_rank, self.layout.tensor_size)

    def blocks(self, entry: Entry) -> list[Block]:
        """The rows of this rank's parameter in order."""
        return blocks_of(entry, [self.part(entry, n).rows(self.shapes[n]) for n in entry.theirs], self.groups)


def _global_names(model: Any, layout: Layout) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with layers and experts numbered over the whole model, not over this rank."""
    layers = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        words = local_name(name).split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = layers[words[2]]
        if "local_experts" in words:
            at = words.index("local_experts") + 1
            experts = model.config.num_moe_experts // layout.expert_size
            words[at] = str(int(words[at]) + layout.expert_rank * experts)
        yield ".".join(words), parameter
