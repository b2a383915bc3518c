"""Load a Hugging Face checkpoint into megatron-core's shards, and stream whole tensors out of them.

families.py says which rows or columns of which tensor a rank has. For streaming, each shard of a
tensor is broadcast by the lowest rank that has it:

    rank 0 | shard a |          -- broadcast by 0 -->  | shard a | shard b |  on every rank,
    rank 1           | shard b |-- broadcast by 1 -->  | shard a | shard b |  by Hugging Face name
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn

from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.models.safetensors_files import INDEX
from spiral_mega.models.tensor_names import EMBEDDING, HEAD
from spiral_mega.policy.megatron.families import (
    ParamMapping,
    RowBlock,
    ShardRange,
    fuse,
    row_blocks,
    shard_range,
    to_local_name,
    unfuse,
)
from spiral_mega.policy.megatron.parallel_layout import ParallelLayout
from spiral_mega.policy.weight_buckets import make_buckets

ValueOf = Callable[[nn.Parameter], torch.Tensor]
Transform = Callable[[str, torch.Tensor], torch.Tensor]


class ShardReader:
    """Reads shards of the tensors in a Hugging Face checkpoint in safetensors.

    With `tied` the head is read from the embedding, whatever the files hold. Raises ValueError if
    there are no safetensors.
    """

    def __init__(self, path: str, *, tied: bool) -> None:
        folder = Path(path)
        if not folder.is_dir():
            folder = Path(
                snapshot_download(
                    path, allow_patterns=["*.safetensors", "*.safetensors.index.json"]
                )
            )
        index = folder / INDEX
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = [file.name for file in folder.glob("*.safetensors")]
        if not files:
            raise ValueError(f"{folder} holds no .safetensors")
        self._stack = ExitStack()
        self._slices: dict[str, Any] = {}
        for name in files:
            file = self._stack.enter_context(safe_open(folder / name, "pt"))
            self._slices |= {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118 (not a dict)
        if tied and EMBEDDING in self._slices:
            self._slices[HEAD] = self._slices[EMBEDDING]

    def shape(self, name: str) -> list[int]:
        """Return the shape of a whole tensor. Raises ValueError if there is none of that name."""
        if name not in self._slices:
            raise ValueError(f"no {name} in its files")
        return self._slices[name].get_shape()

    def read(self, name: str, shard: ShardRange) -> torch.Tensor:
        tensor = self._slices[name]
        if shard.dim is None:
            return tensor[:]
        rows = slice(shard.start, shard.stop)
        return tensor[rows] if shard.dim == 0 else tensor[:, rows]

    def close(self) -> None:
        self._stack.close()


class LocalParam(NamedTuple):
    """A parameter of this rank, and how it maps to Hugging Face tensors."""

    mapping: ParamMapping
    parameter: nn.Parameter


class _LocalShard(NamedTuple):
    """This rank's shard of a Hugging Face tensor: shard `number` of a parameter."""

    mapping: ParamMapping
    parameter: nn.Parameter
    number: int


class _Receiving(NamedTuple):
    """A broadcast in progress, of one shard into `buffer`."""

    work: Any
    shard: ShardRange
    buffer: torch.Tensor


class _Gathering(NamedTuple):
    """A whole tensor that is being filled with its shards."""

    name: str
    whole: torch.Tensor
    receiving: list[_Receiving]

    def wait(self) -> torch.Tensor:
        for work, shard, buffer in self.receiving:
            work.wait()
            if shard.dim == 1:
                self.whole[:, shard.start : shard.stop] = buffer
        return self.whole


class ShardMap:
    """Maps this rank's parameters to shards of Hugging Face tensors, and knows which rank broadcasts which shard."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mappings: Sequence[ParamMapping],
        shape_of: Callable[[str], Sequence[int]],
        layout: ParallelLayout,
        groups: int,
        *,
        tied: bool = False,
    ) -> None:
        """Collective. Raises ValueError for a parameter that has no mapping.

        `parameters`: this rank's, by global name (see by_global_name). `mappings`: of the whole
        model. `shape_of`: of a whole Hugging Face tensor. `groups`: of heads on a rank. With `tied`
        the embedding is streamed under the head's name too.
        """
        self.layout, self.groups, self.tied = layout, groups, tied
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._sources: dict[str, str] = {}  # the first parameter that a tensor maps to
        for mapping in mappings:
            for name in mapping.hf_names:
                self.shapes[name] = tuple(shape_of(name))
                self._sources.setdefault(name, mapping.megatron_name)
        self.local_params = [
            LocalParam(mapping, parameters[mapping.megatron_name])
            for mapping in mappings
            if mapping.megatron_name in parameters
        ]
        if unknown := sorted(parameters.keys() - {mapping.megatron_name for mapping in mappings}):
            raise ValueError(f"no mapping for {', '.join(unknown)}")
        self._local_shards: dict[str, _LocalShard] = {}
        for mapping, parameter in self.local_params:
            for number, name in enumerate(mapping.hf_names):
                self._local_shards[name] = _LocalShard(mapping, parameter, number)
        self._senders = self._find_senders()

    def load(self, read: Callable[[str, ShardRange], torch.Tensor]) -> None:
        """Fill every parameter of this rank; the padding of a vocabulary becomes zero."""
        for mapping, parameter in self.local_params:
            shards = [read(name, self.shard(mapping, name)) for name in mapping.hf_names]
            value = fuse(shards, self.row_blocks(mapping))
            parameter.data.zero_()
            parameter.data[: len(value)].copy_(value)

    def stream(
        self,
        value_of: ValueOf,
        dtype: torch.dtype,
        bucket_bytes: int,
        transform: Transform | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors by Hugging Face name, of `value_of` each parameter, in `dtype`.

        A tied head is yielded under both names. At most `bucket_bytes` are gathered at once, or one
        tensor if that is larger. `transform`, given a tensor's name and a rank's shard of it,
        returns what is broadcast. Collective: every rank must iterate to the end, and gets all
        tensors.
        """
        for bucket in make_buckets(
            self.shapes, partial(self._num_bytes, dtype=dtype), bucket_bytes
        ):
            gathering = [self._start_gathering(name, value_of, dtype, transform) for name in bucket]
            for each in gathering:
                whole = each.wait()
                yield each.name, whole
                if self.tied and each.name == EMBEDDING:
                    yield HEAD, whole

    def is_source(self, mapping: ParamMapping, name: str) -> bool:
        """Whether a tensor is saved from this mapping's parameter.

        Not from a tied head's copy on the last stage.
        """
        return self._sources[name] == mapping.megatron_name

    def shard(self, mapping: ParamMapping, name: str) -> ShardRange:
        """Return what this rank has of the Hugging Face tensor `name`, one of the mapping's."""
        return shard_range(
            mapping, self.shapes[name], self.layout.tensor_rank, self.layout.tensor_size
        )

    def row_blocks(self, mapping: ParamMapping) -> list[RowBlock]:
        """List the rows of this rank's parameter in order."""
        rows = [self.shard(mapping, name).num_rows(self.shapes[name]) for name in mapping.hf_names]
        return row_blocks(mapping, rows, self.groups)

    def _find_senders(self) -> dict[str, dict[ShardRange, int]]:
        """For each tensor and shard, the lowest rank that has it. Collective."""
        own_shards = {
            name: self.shard(local.mapping, name) for name, local in self._local_shards.items()
        }
        senders: dict[str, dict[ShardRange, int]] = {name: {} for name in self.shapes}
        for rank, shards in enumerate(gather_objects(own_shards)):
            for name, shard in shards.items():
                senders[name].setdefault(shard, rank)
        return senders

    def _start_gathering(
        self, name: str, value_of: ValueOf, dtype: torch.dtype, transform: Transform | None
    ) -> _Gathering:
        """Allocate a whole tensor, and start the broadcasts that fill it."""
        device = self.local_params[0].parameter.device
        whole = torch.empty(self.shapes[name], dtype=dtype, device=device)
        own_rank, senders = dist.get_rank(), self._senders[name]
        own_value: torch.Tensor | None = None
        if own_rank in senders.values():
            mapping, parameter, number = self._local_shards[name]
            own_value = unfuse(value_of(parameter), self.row_blocks(mapping), number)
            own_value = own_value if transform is None else transform(name, own_value)
        receiving = []
        for shard, sender in senders.items():
            buffer = whole if shard.dim is None else whole[shard.start : shard.stop]
            if shard.dim == 1:  # columns are not contiguous: they travel in a buffer of their own
                buffer = torch.empty(
                    whole.shape[0], shard.stop - shard.start, dtype=dtype, device=device
                )
            if not buffer.numel():
                continue
            if sender == own_rank:
                assert own_value is not None
                buffer.copy_(own_value)
            receiving.append(
                _Receiving(dist.broadcast(buffer, sender, async_op=True), shard, buffer)
            )
        return _Gathering(name, whole, receiving)

    def _num_bytes(self, name: str, dtype: torch.dtype) -> int:
        return torch.Size(self.shapes[name]).numel() * dtype.itemsize


def by_global_name(
    stages: Sequence[Any], layout: ParallelLayout, named: Callable[[Any], Iterable[tuple[str, Any]]]
) -> dict[str, Any]:
    """Collect what `named` lists of each of a rank's stages (parameters or modules), by the names
    in the mappings.

    These number layers and experts over the whole model, whereas megatron-core numbers those of a
    stage or rank.
    """
    found = {}
    for stage in stages:
        layers = {
            str(i): str(layer.layer_number - 1) for i, layer in enumerate(stage.decoder.layers)
        }
        for name, each in named(stage):
            words = to_local_name(name).split(".")
            if words[:2] == ["decoder", "layers"] and len(words) > 2:
                words[2] = layers[words[2]]
            if "local_experts" in words[:-1]:
                at = words.index("local_experts") + 1
                experts = stage.config.num_moe_experts // layout.expert_size
                words[at] = str(int(words[at]) + layout.expert_rank * experts)
            found[".".join(words)] = each
    return found
