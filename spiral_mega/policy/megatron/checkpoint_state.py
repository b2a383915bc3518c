"""Represent the optimizer's state by Hugging Face name, so that any layout resumes from it.

megatron-core shards its state over the replicas as flat ranges of each rank's parameters. Such a
range is up to three rectangles of a matrix, and each is cut at the boundaries of the Hugging Face
tensors that are fused in it:

    . . . x x     1: part of a row
    x x x x x     2: whole rows
    x x x x x
    x x . . .     3: part of a row

torch.distributed.checkpoint (DCP) stores rectangles, and reads what another layout's rectangles
need of them. So nothing is gathered in order to save, and every rank reads only what it will hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from spiral_mega.policy.megatron.families import RowBlock


class Rectangle(NamedTuple):
    """Rows [row, row + rows) and columns [column, column + columns) of a matrix, at `start` of the flat range."""

    row: int
    rows: int
    column: int
    columns: int
    start: int


def rectangles(start: int, stop: int, columns: int) -> Iterator[Rectangle]:
    """Cut the flat range [start, stop) of a matrix with so many columns into rectangles."""
    at = start
    while at < stop:
        row, column = divmod(at, columns)
        if column or stop - at < columns:
            width = min(columns - column, stop - at)
            yield Rectangle(row, 1, column, width, at - start)
            at += width
        else:
            rows = (stop - at) // columns
            yield Rectangle(row, rows, 0, columns, at - start)
            at += rows * columns


class ShardRectangle(NamedTuple):
    """A rectangle of shard number `shard` of a parameter."""

    shard: int
    rectangle: Rectangle


def cut_by_blocks(rectangle: Rectangle, blocks: Sequence[RowBlock]) -> Iterator[ShardRectangle]:
    """Cut a rectangle of a parameter at the boundaries of its `blocks`, into rectangles of its shards."""
    first = 0  # row of the parameter at which the block starts
    for block in blocks:
        low = max(rectangle.row, first)
        high = min(rectangle.row + rectangle.rows, first + block.rows)
        if low < high:
            start = rectangle.start + (low - rectangle.row) * rectangle.columns
            cut = rectangle._replace(row=block.start + low - first, rows=high - low, start=start)
            yield ShardRectangle(block.shard, cut)
        first += block.rows


class Piece(NamedTuple):
    """A rectangle of a tensor: its offsets in the tensor, and a view of the memory that holds its values."""

    offsets: tuple[int, ...]
    values: torch.Tensor


class TensorPieces(torch.Tensor):
    """The pieces of a float32 tensor on this rank, which DCP reads and writes in place.

    A Tensor by type only, as DCP requires; it computes nothing. `saves`: whether this rank is one
    that saves them.
    """

    pieces: list[Piece]
    saves: bool

    @staticmethod
    def __new__(
        cls: type[TensorPieces], shape: tuple[int, ...], pieces: list[Piece], saves: bool = True
    ) -> TensorPieces:
        self: TensorPieces = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        self.pieces, self.saves = pieces, saves
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Support only what DCP's staging calls before it copies the attributes one by one."""
        if function is torch.ops.aten.new_empty.default:
            return TensorPieces(tuple(args[1]), [])
        raise NotImplementedError(f"{function} of the pieces of a tensor")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TensorPieces({tuple(self.shape)}, {[piece.offsets for piece in self.pieces]})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), values.shape)
            for offsets, values in self.pieces
        ]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        if not self.saves:
            return []
        properties = TensorProperties(dtype=torch.float32)
        items = []
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk, properties, self.shape)
            items.append(
                WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
            )
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(
            values for offsets, values in self.pieces if torch.Size(offsets) == index.offset
        )
