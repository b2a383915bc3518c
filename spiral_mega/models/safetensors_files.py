"""Read and write the safetensors files of a model, one tensor or block of rows at a time.

    file:  | header length (8 bytes) | JSON header | data of tensor | data of tensor | ...
                                       name -> dtype, shape, bytes [start, stop) of the data

Tensors are read into their own memory instead of being mapped, so that resident memory is what the
caller holds.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spiral_mega.distributed.row_gather import TensorSpec
from spiral_mega.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_FILE_BYTES = 4 * 2**30
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, starting at byte `offset`."""

    spec: TensorSpec
    file: Path
    offset: int

    def read(self, rows: range | None = None) -> torch.Tensor:
        """Read the tensor, or only these rows of it.

        Raises UserError if the file ends too early.
        """
        shape, dtype = self.spec.shape, self.spec.dtype
        start = self.offset
        if rows is not None:
            start += self.spec.nbytes // shape[0] * rows.start
            shape = torch.Size([len(rows), *shape[1:]])
        data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        with self.file.open("rb", buffering=0) as file:
            file.seek(start)
            view, done = as_bytes(data), 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise UserError(f"{self.file} ended while it was read: copy it again")
                done += count
        return data.view(dtype).reshape(shape)


def read_model_files(folder: Path) -> dict[str, StoredTensor]:
    """Locate every tensor of the model in `folder`, by name.

    Raises UserError when files are missing, cut off or inconsistent with their index.
    """
    if (folder / INDEX).exists():
        return _read_index(folder)
    if not (folder / SINGLE).exists():
        raise UserError(
            f"{folder} has neither {SINGLE} nor {INDEX}: name a folder with a model's safetensors"
        )
    return read_file(folder / SINGLE)


def _read_index(folder: Path) -> dict[str, StoredTensor]:
    path = folder / INDEX
    try:
        file_of: dict[str, str] = json.loads(path.read_text())["weight_map"]
        files = {name: read_file(folder / name) for name in sorted(set(file_of.values()))}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read ({error!r}): copy it again") from error
    lost = sorted(name for name, file in file_of.items() if name not in files[file])
    if lost:
        raise UserError(
            f"{path} lists {shorten(lost)}, missing from the files that it names: copy the model again"
        )
    stray = sorted(
        name for file, tensors in files.items() for name in tensors if file_of.get(name) != file
    )
    if stray:
        raise UserError(
            f"{path} does not list {shorten(stray)}, which its files hold: copy the model again"
        )
    return {name: files[file][name] for name, file in file_of.items()}


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Locate the tensors of one file, from its header.

    Raises UserError if it is missing, damaged or cut off.
    """
    try:
        size = path.stat().st_size
        tensors, end = _read_header(path, size)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): copy the model again"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(
            f"{path} is not a whole safetensors file ({error}): copy it again"
        ) from error
    if end != size:
        raise UserError(f"{path} has {size:,} bytes where its header needs {end:,}: copy it again")
    return tensors


def _read_header(path: Path, size: int) -> tuple[dict[str, StoredTensor], int]:
    """Return the tensors that the header lists, and the size of the file that it describes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size:
            raise ValueError("its header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data_start = 8 + length
    tensors = {}
    end = data_start
    for name, entry in header.items():
        spec = TensorSpec(torch.Size(entry["shape"]), DTYPES[entry["dtype"]])
        start, stop = entry["data_offsets"]
        if stop - start != spec.nbytes:
            raise ValueError(f"{name} has {stop - start} bytes where its shape needs {spec.nbytes}")
        tensors[name] = StoredTensor(spec, path, data_start + start)
        end = max(end, data_start + stop)
    return tensors, end


class _Location(NamedTuple):
    """A file's name and the byte at which a tensor starts in it."""

    file: str
    offset: int


class ShardedWriter:
    """Writes `tensors` into safetensors files of at most `max_bytes` of data each (or one tensor),
    and their index.

    Every tensor's location is fixed in advance, so tensors and their rows may arrive in any order
    and none is kept.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, TensorSpec], max_bytes: int) -> None:
        self.folder, self.specs = folder, dict(tensors)
        self._missing_bytes = {name: spec.nbytes for name, spec in tensors.items()}
        self._locations: dict[str, _Location] = {}
        shards = _split_into_files(tensors, max_bytes)
        if len(shards) == 1:
            self._create_file(SINGLE, shards[0])
            return
        for number, members in enumerate(shards, 1):
            self._create_file(f"model-{number:05d}-of-{len(shards):05d}.safetensors", members)
        index = {
            "metadata": {"total_size": sum(self._missing_bytes.values())},
            "weight_map": {name: self._locations[name].file for name in tensors},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor, rounded to its planned dtype.

        Raises ValueError for a tensor that was not planned.
        """
        spec = self.specs.get(name)
        if spec is None or spec.shape != tensor.shape:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} was not planned")
        self.add_rows(name, 0, tensor)

    def add_rows(self, name: str, start: int, rows: torch.Tensor) -> None:
        """Write `rows` of a tensor, from row `start` on, rounded to its planned dtype.

        Each row is written once.
        """
        spec = self.specs[name]
        file, offset = self._locations[name]
        data = rows.detach().to("cpu", spec.dtype).contiguous().reshape(-1).view(torch.uint8)
        if spec.shape:
            offset += spec.nbytes // max(1, spec.shape[0]) * start
        with (self.folder / file).open("r+b", buffering=0) as out:
            out.seek(offset)
            view, done = as_bytes(data), 0
            while done < len(view):
                done += out.write(view[done:])
        self._missing_bytes[name] -= len(data)
        if self._missing_bytes[name] < 0:
            raise ValueError(f"{name} was written twice")

    def finish(self) -> None:
        """Raise ValueError if a planned tensor, or a part of one, was never written."""
        missing = sorted(name for name, count in self._missing_bytes.items() if count)
        if missing:
            raise ValueError(f"tensors were not written: {shorten(missing)}")

    def _create_file(self, file: str, members: list[str]) -> None:
        """Write the file's header, and reserve space for its data."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        # Wide dtypes first, so that each tensor starts at a multiple of its item size.
        for name in sorted(members, key=lambda name: -self.specs[name].dtype.itemsize):
            spec = self.specs[name]
            data_offsets = [offset, offset + spec.nbytes]
            header[name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": data_offsets,
            }
            offset += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        for name in members:
            self._locations[name] = _Location(file, 8 + len(text) + header[name]["data_offsets"][0])
        with (self.folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + offset)


def as_bytes(data: torch.Tensor) -> memoryview:
    """View a contiguous uint8 tensor as bytes, without a copy."""
    return memoryview(data.numpy())  # type: ignore[arg-type]


def _split_into_files(tensors: Mapping[str, TensorSpec], max_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    filled = 0
    for name, spec in tensors.items():
        if files[-1] and filled + spec.nbytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += spec.nbytes
    return files


def shorten(names: list[str], count: int = 3) -> str:
    """Join the first `count` names and say how many more there are."""
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")
