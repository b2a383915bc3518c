"""Files that appear whole or not at all, whatever kills the process."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A hidden name beside `path` to write to; it takes the place of `path` when the block ends without error.

    Parent folders are made. The bytes are on disk before the name is, so that a crash cannot leave an empty file.
    Raises OSError as the file system does; the hidden file is then removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays at the end: writers choose their format by it.
    hidden = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        yield hidden
        with open(hidden, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


def write_json_atomic(path: Path, obj: Any, *, indent: int | None = 2) -> None:
    """Write `obj` as JSON. Raises TypeError for what JSON cannot hold, before anything is replaced."""
    text = json.dumps(obj, indent=indent)
    with atomic_path(path) as hidden:
        hidden.write_text(text + "\n", encoding="utf-8")
