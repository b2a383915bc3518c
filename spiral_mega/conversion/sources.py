"""Read a model's tensors in blocks of rows, so that memory is bounded by a block."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from spiral_mega.distributed.row_gather import TensorSpec
from spiral_mega.models.peft_files import LowRankUpdate
from spiral_mega.models.safetensors_files import StoredTensor, as_bytes, read_model_files

BLOCK_BYTES = 64 * 2**20


class Source(Protocol):
    """Tensors by checkpoint name. `read` returns any rows, in the dtype of `specs` or a wider one.

    Reading one of `blocks` at a time is the cheapest way to read a whole tensor.
    """

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def blocks(self, name: str) -> list[range | None]:
        """Return ranges of rows that together cover the tensor.

        None stands for a tensor without rows.
        """

    def read(self, name: str, rows: range | None) -> torch.Tensor: ...


class SafetensorsSource:
    """The model in a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self._stored: dict[str, StoredTensor] = read_model_files(folder)
        self.specs = {name: stored.spec for name, stored in self._stored.items()}

    def blocks(self, name: str) -> list[range | None]:
        spec = self.specs[name]
        if not spec.nbytes or not spec.shape:
            return [None]
        rows = spec.shape[0]
        block_rows = max(1, BLOCK_BYTES * rows // spec.nbytes)
        return [range(start, min(start + block_rows, rows)) for start in range(0, rows, block_rows)]

    def read(self, name: str, rows: range | None) -> torch.Tensor:
        return self._stored[name].read(rows)


class MergedSource:
    """`base` with low-rank updates added to its weights: W + scale * B A, computed in float32."""

    def __init__(
        self,
        base: Source,
        updates: Mapping[str, LowRankUpdate],
        tied: Mapping[str, str],
    ) -> None:
        """`tied`: {head: embedding} if the head has an update and reads its weight from the embedding, else empty."""
        self.base, self.updates, self._tied = base, updates, tied
        self.specs = {
            **base.specs,
            **{head: base.specs[embedding] for head, embedding in tied.items()},
        }

    def blocks(self, name: str) -> list[range | None]:
        return self.base.blocks(self._tied.get(name, name))

    def read(self, name: str, rows: range | None) -> torch.Tensor:
        weight = self.base.read(self._tied.get(name, name), rows)
        update = self.updates.get(name)
        if update is None:
            return weight
        assert rows is not None
        b = update.b[rows.start : rows.stop]
        return torch.addmm(weight.float(), b.float(), update.a.float(), alpha=update.scale)


def read_whole(source: Source, name: str) -> torch.Tensor:
    """Read the whole tensor, in the dtype of its spec."""
    spec = source.specs[name]
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    for rows in source.blocks(name):
        part = source.read(name, rows)
        if rows is None:
            return part
        tensor[rows.start : rows.stop] = part
    return tensor


def digest(source: Source, name: str) -> bytes:
    """Hash a tensor's values, to compare large tensors without holding both in memory."""
    sha = hashlib.sha256()
    for rows in source.blocks(name):
        block = source.read(name, rows).contiguous().reshape(-1)
        sha.update(as_bytes(block.view(torch.uint8)))
    return sha.digest()
