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
    """Yield a hidden path next to `path` to write to; it replaces `path` when the block ends
    without error.

    Creates parent folders. The data is on disk before the name changes, so that a crash cannot
    leave an empty file. Raises OSError as the file system does, and then removes the hidden file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Keep the suffix last: writers choose their format by it.
    hidden = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        yield hidden
        with open(hidden, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


def write_json_atomic(path: Path, obj: Any, *, indent: int | None = 2) -> None:
    """Write `obj` as JSON. Raises TypeError for values that JSON cannot hold, before anything is replaced."""
    text = json.dumps(obj, indent=indent)
    with atomic_path(path) as hidden:
        hidden.write_text(text + "\n", encoding="utf-8")
