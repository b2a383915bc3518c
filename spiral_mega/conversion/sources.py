"""Where tensors come from: each is read by blocks of rows, so that no more than a block is in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from spiral_mega.models.safetensors_files import Form, Stored, raw, read_model_files

BLOCK_BYTES = 64 * 2**20


class Source(Protocol):
    """Tensors by name. `read` gives any rows, at the least cost one of `blocks`, in the type of its form or a wider
    one."""

    @property
    def forms(self) -> Mapping[str, Form]: ...

    def blocks(self, name: str) -> list[range | None]:
        """Ranges of rows that together are the tensor; None stands for a tensor without rows."""

    def read(self, name: str, rows: range | None) -> torch.Tensor: ...


class SafetensorsSource:
    """The model in a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self._stored: dict[str, Stored] = read_model_files(folder)
        self.forms = {name: stored.form for name, stored in self._stored.items()}

    def blocks(self, name: str) -> list[range | None]:
        form = self.forms[name]
        if not form.nbytes or not form.shape:
            return [None]
        count = max(1, BLOCK_BYTES * form.shape[0] // form.nbytes)
        return [range(start, min(start + count, form.shape[0])) for start in range(0, form.shape[0], count)]

    def read(self, name: str, rows: range | None) -> torch.Tensor:
        return self._stored[name].read(rows)


@dataclass(frozen=True, slots=True)
class Factors:
    """A low-rank update of a weight [out, in]: scale * B [out, r] @ A [r, in]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class MergedSource:
    """`base` with low-rank updates in its weights: W + scale * B A, computed in float32."""

    def __init__(self, base: Source, updates: Mapping[str, Factors], tied_head: tuple[str, str] | None) -> None:
        """`tied_head`: (head, embedding) where the head has an update and takes its weight from the embedding."""
        self.base, self.updates = base, updates
        self._aliases = {} if tied_head is None else {tied_head[0]: tied_head[1]}
        self.forms = {**base.forms, **{head: base.forms[embedding] for head, embedding in self._aliases.items()}}

    def blocks(self, name: str) -> list[range | None]:
        return self.base.blocks(self._aliases.get(name, name))

    def read(self, name: str, rows: range | None) -> torch.Tensor:
        weight = self.base.read(self._aliases.get(name, name), rows)
        if (update := self.updates.get(name)) is None:
            return weight
        assert rows is not None
        b = update.b[rows.start : rows.stop]
        return torch.addmm(weight.float(), b.float(), update.a.float(), alpha=update.scale)


def whole(source: Source, name: str) -> torch.Tensor:
    """The whole tensor, in the type of its form."""
    form = source.forms[name]
    tensor = torch.empty(form.shape, dtype=form.dtype)
    for rows in source.blocks(name):
        part = source.read(name, rows)
        if rows is None:
            return part
        tensor[rows.start : rows.stop] = part
    return tensor


def digest(source: Source, name: str) -> bytes:
    """A hash of a tensor's values, by which large ones are compared without being in memory together."""
    sha = hashlib.sha256()
    for rows in source.blocks(name):
        sha.update(raw(source.read(name, rows).contiguous().reshape(-1).view(torch.uint8)))
    return sha.digest()
