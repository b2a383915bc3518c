"""Distributed checkpoints (torch.distributed.checkpoint) read and written piece by piece, by one process.

Names are those that the trainer's own checkpoints use: policy.model.<Hugging Face name>.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

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

from spiral_mega.checkpoint.conversion.sources import Source
from spiral_mega.checkpoint.safetensors_files import Form
from spiral_mega.errors import UserError

METADATA = ".metadata"
PREFIX = "policy.model."
TWO = re.compile(r"policy_(\w+)\.model\.")  # of a run of two models
FILE_BYTES = 256 * 2**20


class DcpSource:
    """The model of the checkpoint in `folder`: one that the trainer wrote, or of a plain state dict.

    A piece is what one rank saved of a tensor. Reading one takes twice its memory. Raises UserError for a checkpoint
    that cannot be read, that holds no model, or whose tensors are cut otherwise than by rows.
    """

    def __init__(self, folder: Path, model: str | None = None) -> None:
        """`model`: which of two. Raises UserError as the class says, and where it is needed, or not to be had."""
        self.folder = folder
        self._reader = FileSystemReader(folder)
        try:
            metadata: Metadata = self._reader.read_metadata()
        except Exception as error:  # a damaged pickle fails in many ways
            raise UserError(f"{folder / METADATA} cannot be read ({error!r}): copy the checkpoint again") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        tensors = {n: m for n, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
        two = sorted({found[1] for name in tensors if (found := TWO.match(name))})
        if model not in (two or [None]):
            holds = f"what was trained of two models, {' and '.join(two)}" if two else "one model"
            raise UserError(
                f"{folder} holds {holds}, and --model is {model}: "
                + (f"name one of these (--model {two[0]})" if two else "leave it out")
            )
        prefix = f"policy_{model}.model." if model else PREFIX
        prefix = prefix if any(name.startswith(prefix) for name in tensors) else ""
        self._stored = {name.removeprefix(prefix): m for name, m in tensors.items() if name.startswith(prefix)}
        self._prefix = prefix
        if not self._stored:
            raise UserError(f"{folder} holds no tensors: name the folder of a checkpoint of a model")
        self.forms = {name: Form(m.size, m.properties.dtype) for name, m in self._stored.items()}
        self._chunks = {name: self._by_rows(name, m) for name, m in self._stored.items()}

    def blocks(self, name: str) -> list[range | None]:
        if not self.forms[name].shape:
            return [None]
        return [range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in self._chunks[name]]

    def read(self, name: str, rows: range | None) -> torch.Tensor:
        start = rows.start if rows is not None else 0
        (chunk,) = [c for c in self._chunks[name] if rows is None or c.offsets[0] == start]
        index = MetadataIndex(self._prefix + name, chunk.offsets)
        item = ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=index,
            dest_offsets=torch.Size([0] * len(chunk.sizes)),
            storage_index=index,
            storage_offsets=torch.Size([0] * len(chunk.sizes)),
            lengths=chunk.sizes,
        )
        target = torch.empty(chunk.sizes, dtype=self.forms[name].dtype)
        try:
            self._reader.read_data(LoadPlan([item]), _Into(target)).wait()
        except Exception as error:  # what a cut-off file raises depends on where it is cut
            raise UserError(
                f"{name} in {self.folder} cannot be read ({type(error).__name__}: {error}): the checkpoint is damaged; "
                "use another"
            ) from error
        return target

    def _by_rows(self, name: str, stored: TensorStorageMetadata) -> list[ChunkStorageMetadata]:
        chunks = sorted((chunk for chunk in stored.chunks if 0 not in chunk.sizes), key=lambda chunk: chunk.offsets)
        row = 0
        for chunk in chunks:
            if stored.size and (chunk.offsets[0] != row or chunk.sizes[1:] != stored.size[1:]):
                raise UserError(
                    f"{name} in {self.folder} is not cut by rows: convert from a checkpoint of FSDP without other "
                    "parallelism"
                )
            row += chunk.sizes[0] if stored.size else 0
        if stored.size and row != stored.size[0]:
            raise UserError(f"{name} in {self.folder} has {row} of {stored.size[0]} rows: the checkpoint is not whole")
        return chunks


class _Into(DefaultLoadPlanner):
    """Reads into one given tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def write_dcp(source: Source, forms: dict[str, Form], aliases: dict[str, str], folder: Path) -> None:
    """Write the tensors of `forms`, in their types, as a checkpoint. `aliases`: names that repeat another's values."""
    planner = _Streaming(source, forms, aliases)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
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
            assert item.tensor_data is not None
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
    """Plans a piece for each block of rows, and reads it when its turn to be written comes."""

    def __init__(self, source: Source, forms: dict[str, Form], aliases: dict[str, str]) -> None:
        super().__init__()
        self.source, self.forms, self.aliases = source, forms, aliases
        self._blocks: dict[MetadataIndex, tuple[str, range | None]] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, form in self.forms.items():
            origin = self.aliases.get(name, name)
            for rows in self.source.blocks(origin):
                whole = rows is None
                offsets = torch.Size([0 if whole or i else rows.start for i in range(len(form.shape))])  # type: ignore[union-attr]
                sizes = form.shape if rows is None else torch.Size([len(rows), *form.shape[1:]])
                index = MetadataIndex(PREFIX + name, offsets)
                self._blocks[index] = origin, rows
                chunk = ChunkStorageMetadata(offsets, sizes)
                data = TensorWriteData(chunk, TensorProperties(dtype=form.dtype), form.shape)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        path = {PREFIX + name: (*PREFIX.strip(".").split("."), name) for name in self.forms}  # as in a nested dict
        self.plan = SavePlan(items, planner_data=path)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        assert write_item.tensor_data is not None
        return self.source.read(*self._blocks[write_item.index]).to(write_item.tensor_data.properties.dtype)
