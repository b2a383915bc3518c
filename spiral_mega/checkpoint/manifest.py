"""Hash a checkpoint's files when they are written, to find damage before they are loaded.

manifest.json lists size in bytes and SHA-256 of every other file. Each rank hashes what it wrote
and, before a load, every world-size-th file.
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
class _HashedResult(WriteResult):
    """A write result that also carries the manifest entries of the files that its rank wrote."""

    entries: dict[str, dict[str, Any]]

    @classmethod
    def from_result(cls, result: WriteResult, entries: dict[str, dict[str, Any]]) -> Self:
        return cls(
            **{field.name: getattr(result, field.name) for field in fields(result)}, entries=entries
        )


class HashingWriter(_FileSystemWriter):
    """DCP's file writer, which also writes the manifest.

    Derived from the private base class: its public subclass would also stage the state, and passes
    on CPU tensors without a copy.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        if results:
            entries = {name: _entry(Path(self.path) / name) for name in names}
            results[0] = _HashedResult.from_result(results[0], entries)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest; on the coordinator, with the results of all ranks."""
        super().finish(metadata, results)
        folder = Path(self.path)
        files = {path.name: _entry(path) for path in (folder / ".metadata", folder / "meta.json")}
        for rank_results in results:
            for result in rank_results:
                if isinstance(result, _HashedResult):
                    files |= result.entries
        write_json_atomic(folder / NAME, {"files": files})


def find_damage(folder: Path, group: dist.ProcessGroup) -> str:
    """Say what is wrong with the checkpoint in `folder`, or return "".

    Collective; the same text on all ranks.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        found, _find_damage_in_part(folder, dist.get_rank(group), len(found)), group=group
    )
    return next((text for text in found if text), "")


def _find_damage_in_part(folder: Path, rank: int, ranks: int) -> str:
    try:
        files = sorted(json.loads((folder / NAME).read_text())["files"].items())
        for name, entry in files:  # sizes are cheap: every rank checks all of them
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
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
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }
