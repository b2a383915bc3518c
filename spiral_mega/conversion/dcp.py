"""Distributed checkpoints (torch.distributed.checkpoint) read and written piece by piece, by one process.

Names are those that the trainer's own checkpoints use: policy.model.<Hugging Face name> on FSDP2, policy.param.<Hugging
Face name> on megatron-core.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from spiral_mega.errors import UserError
from spiral_mega.models.safetensors_files import Form
from spiral_mega.models.tensor_names import Place

METADATA = ".metadata"
FSDP, MEGATRON = "policy.model.", "policy.param."
TWO = re.compile(r"policy_(\w+)\.model\.")  # of a run of two models
FILE_BYTES = 256 * 2**20


class Checkpoint:
    """The tensors stored in `folder`, each in rectangles that ranks have saved; any rectangle of one can be read.

    What a rank saved is read whole, at twice its size. Raises UserError for a checkpoint that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = FileSystemReader(folder)
        try:
            metadata: Metadata = self._reader.read_metadata()
        except Exception as error:  # a damaged pickle fails in many ways
            raise UserError(f"{folder / METADATA} cannot be read ({error!r}): copy the checkpoint again") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        stored = metadata.state_dict_metadata
        self.tensors = {name: m for name, m in stored.items() if isinstance(m, TensorStorageMetadata)}
        if not self.tensors:
            raise UserError(f"{folder} holds no tensors: name the folder of a checkpoint of a model")

    def row_ranges(self, name: str, first: Sequence[int] = ()) -> list[range]:
        """Ranges of rows of the tensor, or of its part at the indices `first`, that no saved rectangle reaches beyond.

        Raises UserError where numbers are missing.
        """
        stored, rows = self.tensors[name], len(first)
        chunks = [c for c in stored.chunks if 0 not in c.sizes and tuple(c.offsets[:rows]) == tuple(first)]
        found = sum(math.prod(chunk.sizes) for chunk in chunks)
        expected = math.prod(stored.size[rows:])
        if found != expected:
            raise UserError(
                f"{name} in {self.folder} has {found} of {expected} numbers: the checkpoint is not whole, or not cut "
                "as checkpoints of models are"
            )
        ranges: list[range] = []
        for start, stop in sorted((c.offsets[rows], c.offsets[rows] + c.sizes[rows]) for c in chunks):
            if ranges and start < ranges[-1].stop:
                ranges[-1] = range(ranges[-1].start, max(stop, ranges[-1].stop))
            else:
                ranges.append(range(start, stop))
        return ranges

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The rectangle of `sizes` at `offsets`."""
        stored = self.tensors[name]
        target = torch.empty(tuple(sizes), dtype=stored.properties.dtype)
        items = []
        for chunk in stored.chunks:
            low = [max(o, c) for o, c in zip(offsets, chunk.offsets, strict=True)]
            high = [min(o + n, c + m) for o, n, c, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)]
            lengths = torch.Size([h - n for n, h in zip(low, high, strict=True)])
            if min(lengths, default=1) > 0:
                index = MetadataIndex(name, chunk.offsets)
                items.append(
                    ReadItem(
                        type=LoadItemType.TENSOR,
                        dest_index=index,
                        dest_offsets=torch.Size([n - o for n, o in zip(low, offsets, strict=True)]),
                        storage_index=index,
                        storage_offsets=torch.Size([n - c for n, c in zip(low, chunk.offsets, strict=True)]),
                        lengths=lengths,
                    )
                )
        try:
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        except Exception as error:  # what a cut-off file raises depends on where it is cut
            raise UserError(
                f"{name} in {self.folder} cannot be read ({type(error).__name__}: {error}): the checkpoint is damaged; "
                "use another"
            ) from error
        return target


class _Into(DefaultLoadPlanner):
    """Reads into one given tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self.target
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class DcpSource:
    """The model of the checkpoint in `folder`: one that the trainer wrote, or of a plain state dict.

    Raises UserError for a checkpoint that cannot be read, that holds no model, or that is not whole.
    """

    def __init__(self, folder: Path, model: str | None = None) -> None:
        """`model`: which of two. Raises UserError as the class says, and where it is needed, or not to be had."""
        self._checkpoint = Checkpoint(folder)
        tensors = self._checkpoint.tensors
        two = sorted({found[1] for name in tensors if (found := TWO.match(name))})
        if model not in (two or [None]):
            holds = f"what was trained of two models, {' and '.join(two)}" if two else "one model"
            raise UserError(
                f"{folder} holds {holds}, and --model is {model}: "
                + (f"name one of these (--model {two[0]})" if two else "leave it out")
            )
        prefixes = (f"policy_{model}.model.",) if model else (FSDP, MEGATRON)
        self._prefix = next((each for each in prefixes if any(name.startswith(each) for name in tensors)), "")
        stored = {n.removeprefix(self._prefix): m for n, m in tensors.items() if n.startswith(self._prefix)}
        self.forms = {name: Form(m.size, m.properties.dtype) for name, m in stored.items()}
        self._rows = {n: self._checkpoint.row_ranges(self._prefix + n) for n, form in self.forms.items() if form.shape}
        self._places: dict[str, Place] = {}
        self._experts: dict[str, tuple[str, range, torch.Tensor]] = {}  # those last read, by projection

    def part_experts(self, places: dict[str, Place]) -> None:
        """Give each expert's projections apart, those of `places`. Raises UserError where a shape is another."""
        stored = dict(self.forms)
        for name, place in places.items():
            if (form := stored.get(place.name)) is None:
                continue  # already apart
            if form.shape != place.shape:
                raise UserError(
                    f"{place.name} in {self._checkpoint.folder} is {tuple(form.shape)}, by the config "
                    f"{tuple(place.shape)}: give the model that was trained by --base"
                )
            self.forms.pop(place.name, None)
            self.forms[name] = Form(torch.Size((len(place.rows), place.shape[2])), form.dtype)
            self._places[name] = place

    def blocks(self, name: str) -> list[range | None]:
        if name in self._places:
            return [range(self.forms[name].shape[0])]
        return list(self._rows.get(name, [None]))

    def read(self, name: str, rows: range | None) -> torch.Tensor:
        if rows is None:
            return self._checkpoint.read(self._prefix + name, (), ())
        if (place := self._places.get(name)) is not None:
            return self._expert(place)[place.rows.start + rows.start : place.rows.start + rows.stop]
        columns = self.forms[name].shape[1:]
        return self._checkpoint.read(self._prefix + name, (rows.start, *([0] * len(columns))), (len(rows), *columns))

    def _expert(self, place: Place) -> torch.Tensor:
        """The matrix of an expert; those that were saved with it are kept until others are read."""
        (block,) = [each for each in self._rows[place.name] if place.expert in each]
        projection = place.name.rpartition(".")[2]
        if self._experts.get(projection, ())[:2] != (place.name, block):
            self._experts.pop(projection, None)  # before the next are read
            sizes = (len(block), *place.shape[1:])
            matrices = self._checkpoint.read(self._prefix + place.name, (block.start, 0, 0), sizes)
            self._experts[projection] = place.name, block, matrices
        return self._experts[projection][2][place.expert - block.start]


class Piece(NamedTuple):
    """A rectangle of a tensor to write: of the whole's name and form, `sizes` at `offsets`; `read` gives its values."""

    name: str
    form: Form
    offsets: Sequence[int]
    sizes: Sequence[int]
    read: Callable[[], torch.Tensor]


def write_dcp(
    source: Source,
    forms: dict[str, Form],
    folder: Path,
    prefix: str,
    aliases: Mapping[str, str] = MappingProxyType({}),
    places: Mapping[str, Place] = MappingProxyType({}),
) -> None:
    """Write the tensors of `forms`, in their types, as the trainer names them. `aliases`: names that repeat another's
    values; `places`: of the tensors that are part of a larger one."""
    pieces = []
    for name, form in forms.items():
        origin, place = aliases.get(name, name), places.get(name)
        for rows in source.blocks(origin):
            read = partial(source.read, origin, rows)
            sizes = form.shape if rows is None else (len(rows), *form.shape[1:])
            offsets = [0 if rows is None or i else rows.start for i in range(len(form.shape))]
            if place is None:
                pieces.append(Piece(prefix + name, form, offsets, sizes, read))
            else:
                whole = Form(place.shape, form.dtype)
                start = (place.expert, place.rows.start + offsets[0], offsets[1])
                pieces.append(Piece(prefix + place.name, whole, start, (1, *sizes), read))
    names = dict.fromkeys(piece.name for piece in pieces)
    paths = {name: (*prefix.strip(".").split("."), name.removeprefix(prefix)) for name in names}  # as in a nested dict
    write_pieces(pieces, folder, paths)


def write_pieces(
    pieces: Sequence[Piece],
    folder: Path,
    paths: dict[str, tuple[str, ...]] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of `pieces`, each read when its turn comes, and of small `objects`. `paths`: where names stand
    in a nested dict."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            planner = _Streaming(pieces, paths or {}, objects or {})
            save({}, storage_writer=_SmallFiles(folder), planner=planner, no_dist=True)
        except CheckpointException as error:  # which is no Exception, and wraps what went wrong
            (cause, _) = error.failures[0]
            if isinstance(cause, UserError):  # from reading the source
                raise cause from None
            # On a full disk torch.save fails once more when it closes its archive, which hides the first reason.
            reason = f"{type(cause).__name__}: {cause}"
            raise UserError(f"{folder} cannot be written ({reason}): check space and rights") from error


class _SmallFiles(FileSystemWriter):
    """Files of at most FILE_BYTES, because torch's writer holds what it writes until it closes the file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files: list[list[WriteItem]] = [[]]
        filled = 0
        for item in plan.items:
            size = 0  # of an object
            if item.tensor_data is not None:
                size = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            if files[-1] and filled + size > FILE_BYTES:
                files.append([])
                filled = 0
            files[-1].append(item)
            filled += size
        results: list[WriteResult] = []
        for number, items in enumerate(files):
            named = replace(plan.storage_data, prefix=f"__{number}_")
            results += super().write_data(replace(plan, items=items, storage_data=named), planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


class _Streaming(DefaultSavePlanner):
    """Plans the pieces, and reads each when its turn to be written comes."""

    def __init__(self, pieces: Sequence[Piece], paths: dict[str, tuple[str, ...]], objects: Mapping[str, Any]) -> None:
        super().__init__()
        self.paths, self.objects = paths, objects
        self._pieces = {MetadataIndex(each.name, torch.Size(each.offsets)): each for each in pieces}

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, (_, form, offsets, sizes, _) in self._pieces.items():
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = TensorWriteData(chunk, TensorProperties(dtype=form.dtype), form.shape)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self.objects]
        self.plan = SavePlan(items, planner_data=self.paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(self.objects[write_item.index.fqn], data)
            return data
        piece = self._pieces[write_item.index]
        return piece.read().to(piece.form.dtype).view(tuple(piece.sizes))
