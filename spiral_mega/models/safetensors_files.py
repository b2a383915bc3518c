"""safetensors files of a model, one tensor at a time: headers read and checked, shards planned before they are written.

Tensors are read into memory of their own and not mapped, so that what is in memory is what is in hand.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spiral_mega.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_FILE_BYTES = 4 * 2**30
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Form:
    """What a tensor is, without its values."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, from byte `offset` on."""

    form: Form
    file: Path
    offset: int

    def read(self, rows: range | None = None) -> torch.Tensor:
        """The tensor, or these rows of it."""
        shape, start = self.form.shape, 0
        if rows is not None:
            start = self.form.nbytes // shape[0] * rows.start
            shape = torch.Size([len(rows), *shape[1:]])
        data = torch.empty(math.prod(shape) * self.form.dtype.itemsize, dtype=torch.uint8)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset + start)
            view, done = raw(data), 0
            while done < len(view):
                if not (count := file.readinto(view[done:])):
                    raise UserError(f"{self.file} ended while it was read: copy it again")
                done += count
        return data.view(self.form.dtype).reshape(shape)


def read_model_files(folder: Path) -> dict[str, Stored]:
    """Every tensor of the model in `folder` by name. Raises UserError when files are missing, cut off or do not agree
    with their index."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}: name a folder with a model's safetensors")
        return read_file(folder / SINGLE)
    try:
        where: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        files = {name: read_file(folder / name) for name in sorted(set(where.values()))}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder / INDEX} cannot be read ({error!r}): copy it again") from error
    if lost := sorted(name for name, file in where.items() if name not in files[file]):
        raise UserError(f"{folder / INDEX} names {shorten(lost)}, not in the files it says: copy the model again")
    stray = sorted(name for file, entries in files.items() for name in entries if where.get(name) != file)
    if stray:
        raise UserError(f"{folder / INDEX} does not name {shorten(stray)}, which its files hold: copy the model again")
    return {name: files[file][name] for name, file in where.items()}


def read_file(path: Path) -> dict[str, Stored]:
    """The tensors of one file, from its header. Raises UserError for a file that is missing, damaged or cut off."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {}
        end = 8 + length
        for name, entry in header.items():
            form = Form(torch.Size(entry["shape"]), DTYPES[entry["dtype"]])
            start, stop = entry["data_offsets"]
            if stop - start != form.nbytes:
                raise ValueError(f"{name} has {stop - start} bytes where its shape needs {form.nbytes}")
            found[name] = Stored(form, path, 8 + length + start)
            end = max(end, 8 + length + stop)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): copy the model again") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}): copy it again") from error
    if end != size:
        raise UserError(f"{path} has {size:,} bytes where its header needs {end:,}: copy it again")
    return found


class ShardedWriter:
    """Writes `tensors` into safetensors files of at most `max_bytes` of data each (or one tensor), and their index.

    Their places are planned, so they may come in any order and none is kept.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Form], max_bytes: int) -> None:
        self.folder, self.forms = folder, dict(tensors)
        self._left = {name: form.nbytes for name, form in tensors.items()}
        shards = _split(tensors, max_bytes)
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        if len(shards) == 1:
            files = [SINGLE]
        self._places: dict[str, tuple[str, int]] = {}
        for file, members in zip(files, shards, strict=True):
            self._open(file, members)
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(self._left.values())},
                "weight_map": {name: self._places[name][0] for name in tensors},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=1))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor, rounded to its planned type."""
        if (form := self.forms.get(name)) is None or form.shape != tensor.shape:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} was not planned")
        self.add_rows(name, 0, tensor)

    def add_rows(self, name: str, start: int, rows: torch.Tensor) -> None:
        """Write `rows` of a tensor, from row `start` on, rounded to its planned type. Each row comes once."""
        form = self.forms[name]
        file, offset = self._places[name]
        data = rows.detach().to("cpu", form.dtype).contiguous().reshape(-1).view(torch.uint8)
        if form.shape:
            offset += form.nbytes // max(1, form.shape[0]) * start
        with (self.folder / file).open("r+b", buffering=0) as out:
            out.seek(offset)
            view, done = raw(data), 0
            while done < len(view):
                done += out.write(view[done:])
        self._left[name] -= len(data)
        if self._left[name] < 0:
            raise ValueError(f"{name} came twice")

    def finish(self) -> None:
        """Raise ValueError when a planned tensor never came, or not all of it."""
        if missing := sorted(name for name, left in self._left.items() if left):
            raise ValueError(f"tensors were not given: {shorten(missing)}")

    def _open(self, file: str, members: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        # Wide types first, so that each tensor starts at a multiple of its type's size.
        for name in sorted(members, key=lambda name: -self.forms[name].dtype.itemsize):
            form = self.forms[name]
            data_offsets = [offset, offset + form.nbytes]
            header[name] = {"dtype": NAMES[form.dtype], "shape": list(form.shape), "data_offsets": data_offsets}
            offset += form.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        for name in members:
            self._places[name] = file, 8 + len(text) + header[name]["data_offsets"][0]
        with (self.folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + offset)


def raw(data: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor of bytes, uncopied."""
    return memoryview(data.numpy())  # type: ignore[arg-type]


def _split(tensors: Mapping[str, Form], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, form in tensors.items():
        if shards[-1] and filled + form.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += form.nbytes
    return shards


def shorten(names: list[str], count: int = 3) -> str:
    """The first few of many names."""
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")
