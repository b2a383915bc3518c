"""Read and write distributed checkpoints (torch.distributed.checkpoint) in one process, by pieces.

The trainer's checkpoints name a weight by its backend: policy.model.<name> on FSDP2, with
transformers' name, and policy.param.<name> on megatron-core, with the name in Hugging Face
checkpoints. A run of two models has policy_search.model.<name> and policy_aggregation.model.<name>.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from spiral_mega.conversion.sources import Source
from spiral_mega.distributed.row_gather import TensorSpec
from spiral_mega.errors import UserError
from spiral_mega.models.tensor_names import ExpertSlice

METADATA = ".metadata"
FSDP_PREFIX, MEGATRON_PREFIX = "policy.model.", "policy.param."
TWO_MODELS = re.compile(r"policy_(\w+)\.model\.")  # names in a checkpoint of a run of two models
FILE_BYTES = 256 * 2**20


class DcpReader:
    """Reads any rectangle of the tensors in the checkpoint in `folder`.

    Ranks save tensors as rectangles ("chunks"). A chunk is read whole and takes twice its size in
    memory. Raises UserError for a checkpoint that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = FileSystemReader(folder)
        try:
            metadata: Metadata = self._reader.read_metadata()
        except Exception as error:  # a damaged pickle fails in many ways
            raise UserError(
                f"{folder / METADATA} cannot be read ({error!r}): copy the checkpoint again"
            ) from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        stored = metadata.state_dict_metadata
        self.tensors = {
            name: m for name, m in stored.items() if isinstance(m, TensorStorageMetadata)
        }
        if not self.tensors:
            raise UserError(
                f"{folder} holds no tensors: name the folder of a checkpoint of a model"
            )

    def row_ranges(self, name: str, first: Sequence[int] = ()) -> list[range]:
        """Return ranges of rows that no chunk straddles, so that reading them one by one reads each
        chunk once.

        Rows are those of the tensor, or of its slice at the leading indices `first`. Raises
        UserError if elements are missing from the checkpoint.
        """
        stored, dim = self.tensors[name], len(first)
        chunks = [
            c for c in stored.chunks if 0 not in c.sizes and tuple(c.offsets[:dim]) == tuple(first)
        ]
        found = sum(math.prod(chunk.sizes) for chunk in chunks)
        expected = math.prod(stored.size[dim:])
        if found != expected:
            raise UserError(
                f"{name} in {self.folder} has {found} of {expected} numbers: the checkpoint is not "
                "whole, or not cut as checkpoints of models are"
            )
        return _merge_overlapping(
            range(c.offsets[dim], c.offsets[dim] + c.sizes[dim]) for c in chunks
        )

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Read the rectangle of `sizes` at `offsets`. Raises UserError if its files are damaged."""
        stored = self.tensors[name]
        target = torch.empty(tuple(sizes), dtype=stored.properties.dtype)
        overlaps = (_overlap(name, chunk, offsets, sizes) for chunk in stored.chunks)
        items = [item for item in overlaps if item is not None]
        try:
            self._reader.read_data(LoadPlan(items), _LoadInto(target)).wait()
        except Exception as error:  # what a cut-off file raises depends on where it is cut
            raise UserError(
                f"{name} in {self.folder} cannot be read ({type(error).__name__}: {error}): the "
                "checkpoint is damaged; use another"
            ) from error
        return target


def _merge_overlapping(ranges: Iterable[range]) -> list[range]:
    merged: list[range] = []
    for each in sorted(ranges, key=lambda each: (each.start, each.stop)):
        if merged and each.start < merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(each.stop, merged[-1].stop))
        else:
            merged.append(each)
    return merged


def _overlap(
    name: str,
    chunk: ChunkStorageMetadata,
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> ReadItem | None:
    """Request what a chunk holds of the rectangle of `sizes` at `offsets`.

    None if they do not overlap.
    """
    lows, lengths = [], []
    for start, size, chunk_start, chunk_size in zip(
        offsets, sizes, chunk.offsets, chunk.sizes, strict=True
    ):
        low = max(start, chunk_start)
        length = min(start + size, chunk_start + chunk_size) - low
        if length <= 0:
            return None
        lows.append(low)
        lengths.append(length)
    index = MetadataIndex(name, chunk.offsets)
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=torch.Size([low - start for low, start in zip(lows, offsets, strict=True)]),
        storage_index=index,
        storage_offsets=torch.Size(
            [low - start for low, start in zip(lows, chunk.offsets, strict=True)]
        ),
        lengths=torch.Size(lengths),
    )


class _LoadInto(DefaultLoadPlanner):
    """Loads into one given tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self.target
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class _ExpertBlock(NamedTuple):
    """Matrices of the consecutive `experts` of the fused parameter `name`, saved together by one rank."""

    name: str
    experts: range
    matrices: torch.Tensor


class DcpSource:
    """The model in the checkpoint in `folder`: written by the trainer, or a plain state dict.

    Raises UserError for a checkpoint that cannot be read, that holds no model, or that is not
    whole.
    """

    def __init__(self, folder: Path, model: str | None = None) -> None:
        """`model`: which model of two.

        Raises UserError if it is missing, or if there is no such model.
        """
        self._reader = DcpReader(folder)
        tensors = self._reader.tensors
        self._prefix = _find_prefix(folder, tensors, model)
        self.specs: dict[str, TensorSpec] = {}
        for name, stored in tensors.items():
            if name.startswith(self._prefix):
                self.specs[name.removeprefix(self._prefix)] = TensorSpec(
                    stored.size, stored.properties.dtype
                )
        self._row_ranges = {
            name: self._reader.row_ranges(self._prefix + name)
            for name, spec in self.specs.items()
            if spec.shape
        }
        self._expert_slices: dict[str, ExpertSlice] = {}
        self._last_experts: dict[str, _ExpertBlock] = {}  # the block read last, by projection

    def split_experts(self, slices: Mapping[str, ExpertSlice]) -> None:
        """Replace fused experts by each expert's own projections, as `slices` says.

        Raises UserError if a fused parameter does not have the shape that `slices` gives it.
        """
        stored = dict(self.specs)
        for name, expert in slices.items():
            spec = stored.get(expert.name)
            if spec is None:
                continue  # saved expert by expert
            if spec.shape != expert.shape:
                raise UserError(
                    f"{expert.name} in {self._reader.folder} is {tuple(spec.shape)}, by the config "
                    f"{tuple(expert.shape)}: give the model that was trained by --base"
                )
            self.specs.pop(expert.name, None)
            self.specs[name] = TensorSpec(
                torch.Size((len(expert.rows), expert.shape[2])), spec.dtype
            )
            self._expert_slices[name] = expert

    def blocks(self, name: str) -> list[range | None]:
        if name in self._expert_slices:
            return [range(self.specs[name].shape[0])]
        return list(self._row_ranges.get(name, [None]))

    def read(self, name: str, rows: range | None) -> torch.Tensor:
        if rows is None:
            return self._reader.read(self._prefix + name, (), ())
        expert = self._expert_slices.get(name)
        if expert is not None:
            start = expert.rows.start
            return self._read_expert(expert)[start + rows.start : start + rows.stop]
        columns = self.specs[name].shape[1:]
        offsets = (rows.start, *(0 for _ in columns))
        return self._reader.read(self._prefix + name, offsets, (len(rows), *columns))

    def _read_expert(self, expert: ExpertSlice) -> torch.Tensor:
        """Return the expert's matrix in a fused parameter.

        Experts saved together are kept until others are read.
        """
        (experts,) = (each for each in self._row_ranges[expert.name] if expert.expert in each)
        projection = expert.name.rpartition(".")[2]
        last = self._last_experts.get(projection)
        if last is None or (last.name, last.experts) != (expert.name, experts):
            last = None
            self._last_experts.pop(projection, None)  # free it before the next block is read
            sizes = (len(experts), *expert.shape[1:])
            matrices = self._reader.read(self._prefix + expert.name, (experts.start, 0, 0), sizes)
            last = self._last_experts[projection] = _ExpertBlock(expert.name, experts, matrices)
        return last.matrices[expert.expert - experts.start]


def _find_prefix(folder: Path, tensors: Collection[str], model: str | None) -> str:
    """Return what the names of the model's tensors start with.

    Raises UserError if `model` does not select one.
    """
    matches = (TWO_MODELS.match(name) for name in tensors)
    models = sorted({match[1] for match in matches if match})
    if models and model not in models:
        raise UserError(
            f"{folder} holds what was trained of two models, {' and '.join(models)}, and --model "
            f"is {model}: name one of these (--model {models[0]})"
        )
    if model is not None and not models:
        raise UserError(f"{folder} holds one model, and --model is {model}: leave it out")
    prefixes = (FSDP_PREFIX, MEGATRON_PREFIX) if model is None else (f"policy_{model}.model.",)
    for prefix in prefixes:
        if any(name.startswith(prefix) for name in tensors):
            return prefix
    return ""


class Piece(NamedTuple):
    """A rectangle to write: of the tensor `name` of `spec`, `sizes` at `offsets`.

    `read` returns its values.
    """

    name: str
    spec: TensorSpec
    offsets: Sequence[int]
    sizes: Sequence[int]
    read: Callable[[], torch.Tensor]


def write_dcp(
    source: Source,
    specs: Mapping[str, TensorSpec],
    folder: Path,
    prefix: str,
    aliases: Mapping[str, str] = MappingProxyType({}),
    experts: Mapping[str, ExpertSlice] = MappingProxyType({}),
) -> None:
    """Write the tensors of `specs`, in these dtypes, under the trainer's names, which start with
    `prefix`.

    `aliases`: names that repeat another tensor's values. `experts`: tensors that are written as
    slices of a fused one.
    """
    pieces = []
    for name, spec in specs.items():
        origin = aliases.get(name, name)
        for rows in source.blocks(origin):
            piece = _block_of_rows(name, spec, rows, partial(source.read, origin, rows))
            if name in experts:
                piece = _in_fused_experts(piece, experts[name])
            pieces.append(piece._replace(name=prefix + piece.name))
    names = dict.fromkeys(piece.name for piece in pieces)
    parents = prefix.strip(".").split(".")
    nested_paths = {name: (*parents, name.removeprefix(prefix)) for name in names}
    write_pieces(pieces, folder, nested_paths)


def _block_of_rows(
    name: str,
    spec: TensorSpec,
    rows: range | None,
    read: Callable[[], torch.Tensor],
) -> Piece:
    if rows is None:
        return Piece(name, spec, [0] * len(spec.shape), spec.shape, read)
    offsets = [rows.start] + [0] * (len(spec.shape) - 1)
    return Piece(name, spec, offsets, (len(rows), *spec.shape[1:]), read)


def _in_fused_experts(piece: Piece, expert: ExpertSlice) -> Piece:
    """Place a block of an expert's projection [rows, columns] in the fused parameter [E, rows, columns]."""
    row, column = piece.offsets
    return Piece(
        expert.name,
        TensorSpec(expert.shape, piece.spec.dtype),
        (expert.expert, expert.rows.start + row, column),
        (1, *piece.sizes),
        piece.read,
    )


def write_pieces(
    pieces: Sequence[Piece],
    folder: Path,
    nested_paths: dict[str, tuple[str, ...]] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of `pieces`, each read when its turn comes, and of small `objects`.

    `nested_paths`: where each name is in a nested dict. Raises UserError if the folder cannot be
    written.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            planner = _StreamingPlanner(pieces, nested_paths or {}, objects or {})
            save({}, storage_writer=_SmallFileWriter(folder), planner=planner, no_dist=True)
        except CheckpointException as error:  # a BaseException that wraps the cause
            (cause, _) = error.failures[0]
            if isinstance(cause, UserError):  # from reading the source
                raise cause from None
            # On a full disk torch.save fails once more when it closes its archive, which hides the
            # first reason.
            reason = f"{type(cause).__name__}: {cause}"
            raise UserError(
                f"{folder} cannot be written ({reason}): check space and rights"
            ) from error


class _SmallFileWriter(FileSystemWriter):
    """Writes files of at most FILE_BYTES, because torch's writer holds what it writes until it closes the file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_split_into_files(plan.items)):
            storage_data = replace(plan.storage_data, prefix=f"__{number}_")
            file_plan = replace(plan, items=items, storage_data=storage_data)
            results += super().write_data(file_plan, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _split_into_files(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    files: list[list[WriteItem]] = [[]]
    filled = 0
    for item in items:
        size = 0  # of an object
        if item.tensor_data is not None:
            size = (
                math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            )
        if files[-1] and filled + size > FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled += size
    return files


class _StreamingPlanner(DefaultSavePlanner):
    """Plans the pieces, and reads each one when its turn to be written comes."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        nested_paths: dict[str, tuple[str, ...]],
        objects: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.nested_paths, self.objects = nested_paths, objects
        self._pieces = {
            MetadataIndex(piece.name, torch.Size(piece.offsets)): piece for piece in pieces
        }

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, piece in self._pieces.items():
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
            data = TensorWriteData(
                chunk, TensorProperties(dtype=piece.spec.dtype), piece.spec.shape
            )
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self.objects]
        self.plan = SavePlan(items, planner_data=self.nested_paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(self.objects[write_item.index.fqn], data)
            return data
        piece = self._pieces[write_item.index]
        return piece.read().to(piece.spec.dtype).view(tuple(piece.sizes))
