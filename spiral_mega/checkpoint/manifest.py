"""What a checkpoint's files hold, written down when they are written, so that damage is found before it is loaded.

manifest.json lists bytes and SHA-256 of every other file. Each rank hashes what it wrote and, on load, a share of all.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from spiral_mega.telemetry.atomic import write_json_atomic

NAME = "manifest.json"


@dataclass(frozen=True)
class _Hashed(WriteResult):
    """A write result that also carries the entries of the files that its rank wrote."""

    entries: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, result: WriteResult, entries: dict[str, dict[str, Any]]) -> Self:
        return cls(**{field.name: getattr(result, field.name) for field in fields(result)}, entries=entries)


class HashingWriter(_FileSystemWriter):
    """DCP's writer of files, and their manifest.

    Not its public subclass, which would also stage the state, and hands on CPU tensors without a copy.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        if results:
            results[0] = _Hashed.of(results[0], {name: _entry(Path(self.path) / name) for name in names})
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, with the results of all ranks."""
        super().finish(metadata, results)
        folder = Path(self.path)
        files = {path.name: _entry(path) for path in (folder / ".metadata", folder / "meta.json")}
        for result in (result for each in results for result in each):
            files.update(result.entries if isinstance(result, _Hashed) else {})
        write_json_atomic(folder / NAME, {"files": files})


def find_damage(folder: Path, group: dist.ProcessGroup) -> str:
    """What is wrong with the checkpoint in `folder`, or ""; collective, the same text on all ranks."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, _damage_of_share(folder, dist.get_rank(group), len(found)), group=group)
    return next((text for text in found if text), "")


def _damage_of_share(folder: Path, rank: int, ranks: int) -> str:
    try:
        files = sorted(json.loads((folder / NAME).read_text())["files"].items())
        for name, entry in files:  # sizes cost nothing: every rank looks at all of them
            if (size := (folder / name).stat().st_size) != entry["bytes"]:
                return f"{name} has {size} bytes and not {entry['bytes']}"
        for name, entry in files[rank::ranks]:
            if _entry(folder / name) != entry:
                return f"{name} does not hold what was written (SHA-256)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{NAME} or a file that it names cannot be read ({type(error).__name__}: {error})"
    return ""


def _entry(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
