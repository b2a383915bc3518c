"""Read the raw rows of a source: a JSONL file, a Parquet file, or a Hugging Face dataset.

A reader knows nothing of problems. It gives the location of each row, so that later errors can name
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spiral_mega.config.schema import DataSource
from spiral_mega.errors import DataError

Row = dict[str, Any]
BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class RawSource:
    """The rows of a source, read on iteration.

    Ids and metrics are derived from `name`; `total` is the number of rows; `rows` yields (location,
    row) in the source's order, with a location such as "math.jsonl, line 3".
    """

    name: str
    total: int
    rows: Iterator[tuple[str, Row]]


def open_source(source: DataSource) -> RawSource:
    """Open `source.path`: a .jsonl file, a .parquet file, else a Hugging Face dataset.

    Raises DataError when it is not readable. Rows are decoded, and their errors raised, on
    iteration.
    """
    path = Path(source.path)
    if path.suffix in READERS:
        if not path.is_file():
            raise DataError(f"{path}: no such file: correct the path in the data section")
        if source.subset is not None:
            raise DataError(
                f"{path}: subset is {source.subset!r}, but a file has no subsets: remove it"
            )
        return READERS[path.suffix](path)
    if path.is_file():
        raise DataError(
            f"{path}: files are read as {' or '.join(READERS)}, by their suffix: convert or rename it"
        )
    return _open_dataset(source)


def _open_jsonl(path: Path) -> RawSource:
    lines = [
        (number, line)
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1)
        if line.strip()
    ]

    def rows() -> Iterator[tuple[str, Row]]:
        for number, line in lines:
            location = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{location}: not UTF-8 ({error}): re-encode the file as UTF-8"
                ) from None
            except (
                ValueError,
                RecursionError,
            ) as error:  # also numbers and nesting beyond Python's limits
                raise DataError(
                    f"{location}: not JSON ({error}): write one JSON object a line"
                ) from None
            if not isinstance(row, dict):
                raise DataError(
                    f"{location}: holds a {type(row).__name__}: write one JSON object a line"
                )
            yield location, row

    return RawSource(path.stem, len(lines), rows())


def _open_parquet(path: Path) -> RawSource:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}): write it again") from error
    return RawSource(
        path.stem, file.metadata.num_rows, _arrow_rows(str(path), file.iter_batches(BATCH_ROWS))
    )


READERS = {".jsonl": _open_jsonl, ".parquet": _open_parquet}


def _open_dataset(source: DataSource) -> RawSource:
    data = _load_dataset(source)
    folder = Path(source.path)
    base = folder.resolve().name if folder.is_dir() else source.path.rstrip("/")
    name = "/".join(part for part in (base, source.subset, source.split) if part)
    batches = data.with_format("arrow").iter(BATCH_ROWS)
    return RawSource(name, len(data), _arrow_rows(f"dataset {name}", batches))


def _load_dataset(source: DataSource) -> Any:
    """Return the Hugging Face dataset at `source.path`: a folder written by save_to_disk, or any other by name."""
    import datasets

    folder = Path(source.path)
    saved_to_disk = any(
        (folder / marker).is_file() for marker in ("dataset_dict.json", "state.json")
    )
    if saved_to_disk and source.subset is not None:
        raise DataError(
            f"{folder}: subset is {source.subset!r}, but a dataset saved to disk has none: remove it"
        )
    try:
        if not saved_to_disk:
            return datasets.load_dataset(source.path, source.subset, split=source.split)
        data = datasets.load_from_disk(source.path)
        if isinstance(data, datasets.DatasetDict):
            if source.split not in data:
                raise ValueError(f"its splits are {sorted(map(str, data))}")
            data = data[source.split]
        return data
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"dataset {source.path!r}, subset {source.subset!r}, split {source.split!r} cannot be "
            f"loaded ({error}): check the three values; without network access, download the "
            "dataset first and give the path of its folder, or of a .jsonl or .parquet file"
        ) from error


def _arrow_rows(name: str, batches: Iterable[Any]) -> Iterator[tuple[str, Row]]:
    """Yield the rows of Arrow batches as Python values, numbered from 0 as in dataset viewers."""
    start = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:  # one by one, to find the row at fault
            rows = [
                _decode(batch.slice(i, 1), f"{name}, row {start + i}")
                for i in range(batch.num_rows)
            ]
        for i, row in enumerate(rows):
            yield f"{name}, row {start + i}", row
        start += batch.num_rows


def _decode(batch: Any, location: str) -> Row:
    """Return the only row of `batch`."""
    try:
        row: Row = batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        raise DataError(f"{location}: not UTF-8 ({error}): write the text as UTF-8") from None
    return row
