"""The optimizer's state by Hugging Face name, for checkpoints that any layout can go on from.

megatron-core cuts its state over the replicas as flat ranges of each rank's parameters. Such a range is a few
rectangles of Hugging Face tensors; torch.distributed.checkpoint stores rectangles, and reads what another layout's
rectangles need of them. So nothing is gathered to be saved, and every rank reads what it will hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from spiral_mega.policy.megatron.families import Block


class Rectangle(NamedTuple):
    """Rows [row, row + rows) and columns [column, column + columns) of a parameter; at `start` of the flat range."""

    row: int
    rows: int
    column: int
    columns: int
    start: int


def rectangles(start: int, stop: int, columns: int) -> Iterator[Rectangle]:
    """The flat range [start, stop) of a matrix of so many columns: part of a row, whole rows, part of a row."""
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


def cut_by_blocks(whole: Rectangle, blocks: list[Block]) -> Iterator[tuple[int, Rectangle]]:
    """`whole` as rectangles of the parts: the number of the part, and rows counted in it."""
    first = 0
    for block in blocks:
        low, high = max(whole.row, first), min(whole.row + whole.rows, first + block.rows)
        if low < high:
            start = whole.start + (low - whole.row) * whole.columns
            yield block.part, whole._replace(row=block.start + low - first, rows=high - low, start=start)
        first += block.rows


class Pieces(torch.Tensor):
    """What this rank holds of a tensor: (offsets, values) of rectangles, which DCP reads and writes in place.

    A Tensor by type only, as DCP demands; it computes nothing. `written`: whether this rank is one that saves them.
    """

    pieces: list[tuple[tuple[int, ...], torch.Tensor]]
    written: bool

    @staticmethod
    def __new__(
        cls: type[Pieces],
        shape: tuple[int, ...],
        pieces: list[tuple[tuple[int, ...], torch.Tensor]],
        written: bool = True,
    ) -> Pieces:
        self: Pieces = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        self.pieces, self.written = pieces, written
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Only what DCP's staging asks for before it copies the attributes one by one."""
        if function is torch.ops.aten.new_empty.default:
            return Pieces(tuple(args[1]), [])
        raise NotImplementedError(f"{function} of the pieces of a tensor")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pieces({tuple(self.shape)}, {[offsets for offsets, _ in self.pieces]})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), values.shape) for offsets, values in self.pieces]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=torch.float32)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in (self.__create_chunk_list__() if self.written else [])
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(values for offsets, values in self.pieces if torch.Size(offsets) == index.offset)
