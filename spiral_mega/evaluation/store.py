"""What an evaluation keeps on disk, so that it resumes after its last complete chunk when killed.

evaluation.json                            what is evaluated and how; any other is refused here
records/<sampling>/chunk_000000.json       graded episodes of a chunk; exists once it is complete
traces/<sampling>/chunk_000000.rank0.parquet
results.json, analysis.json                at the end
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spiral_mega.checkpoint.resume import describe_changes
from spiral_mega.errors import UserError
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.telemetry import write_json_atomic
from spiral_mega.telemetry.trace_file import write_traces
from spiral_mega.traces import Episode

IDENTITY_FILE = "evaluation.json"


class Store:
    """The files of one evaluation under `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self, identity: dict[str, Any]) -> None:
        """Record what is evaluated. Raises UserError if the folder holds another evaluation."""
        path = self.folder / IDENTITY_FILE
        if path.exists():
            try:
                recorded = json.loads(path.read_text())
            except ValueError as error:
                raise UserError(
                    f"{path} cannot be read ({error}): remove {self.folder}, or use another"
                ) from error
            if changed := describe_changes(recorded, json.loads(json.dumps(identity))):
                raise UserError(
                    f"{self.folder} holds another evaluation ({'; '.join(changed)}): choose "
                    "another --output, or remove the folder"
                )
        write_json_atomic(path, identity)

    def has(self, sampling: str, chunk: int) -> bool:
        return self._records(sampling, chunk).exists()

    def read(self, sampling: str, chunk: int) -> list[GradedEpisode]:
        """Read the chunk's records. Raises UserError if they are damaged, or of another version."""
        path = self._records(sampling, chunk)
        try:
            return [GradedEpisode(**record) for record in json.loads(path.read_text())]
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path} cannot be read ({error}): remove {self.folder}, and evaluate again"
            ) from error

    def write(self, sampling: str, chunk: int, graded: Sequence[GradedEpisode]) -> None:
        """Write the chunk's records. From here on it counts as complete."""
        write_json_atomic(
            self._records(sampling, chunk), [asdict(each) for each in graded], indent=None
        )

    def write_traces(
        self, sampling: str, chunk: int, rank: int, episodes: Sequence[Episode]
    ) -> None:
        write_traces(self._traces(sampling) / f"chunk_{chunk:06d}.rank{rank}.parquet", episodes)

    def remove_traces(self, sampling: str, chunk: int) -> None:
        """Remove the chunk's traces of an attempt that was killed, perhaps one on more ranks."""
        for path in self._traces(sampling).glob(f"chunk_{chunk:06d}.rank*.parquet"):
            path.unlink()

    def _records(self, sampling: str, chunk: int) -> Path:
        return self.folder / "records" / sampling / f"chunk_{chunk:06d}.json"

    def _traces(self, sampling: str) -> Path:
        return self.folder / "traces" / sampling
