"""Batches on disk: recorded as they are collected, and replayed without an engine.

For debugging, for timing the trainer alone, and for comparing policies on the same episodes. A
replay may have another number of ranks, another policy or another objective: credit is assigned
anew.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.rollout.batch import AssignCredit, Batch
from spiral_mega.telemetry.trace_file import (
    EPISODE,
    episode_from_row,
    episode_row,
    read_traces,
    trace_path,
    write_rows,
)
from spiral_mega.traces import Episode

# `prompts`: token ids of the search prompt, then of each set's.
RECORD = pa.schema([*EPISODE, pa.field("prompts", pa.list_(pa.list_(pa.int32())))])


class Collector(Protocol):
    """Collects a step's batch; collective."""

    def collect(self, step: int, assign_credit: AssignCredit) -> Batch:
        """Return this rank's part of the batch of `step`, after calling `assign_credit` once for each episode."""


class Recorder:
    """Writes what `collector` collects under `folder`/traces, one file for each step and rank."""

    def __init__(self, collector: Collector, folder: str, runtime: Runtime) -> None:
        self.collector, self.folder, self.runtime = collector, folder, runtime

    def collect(self, step: int, assign_credit: AssignCredit) -> Batch:
        batch = self.collector.collect(step, assign_credit)
        totals = {
            "kept_indices": batch.kept_indices,
            "num_prompts": batch.num_prompts,
            "num_effective": batch.num_effective,
            "num_cancelled": batch.num_cancelled,
            "ranks": self.runtime.world_size,
        }
        schema = RECORD.with_metadata({"batch": json.dumps(totals)})
        path = trace_path(self.folder, step + 1, self.runtime.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, batch.sampled, _record_row, schema)
        return batch


class Replayer:
    """Collects what a Recorder wrote under `folder`.

    Raises UserError if a file of any of `steps` is missing.
    """

    def __init__(self, folder: str, steps: range, runtime: Runtime) -> None:
        self.folder, self.runtime = folder, runtime
        for step in steps:
            self._read_totals(step)

    def collect(self, step: int, assign_credit: AssignCredit) -> Batch:
        totals = self._read_totals(step)
        sampled = []
        for rank in range(totals["ranks"]):
            for row in read_traces(trace_path(self.folder, step + 1, rank)):
                if row["index"] % self.runtime.world_size == self.runtime.rank:
                    sampled.append(episode_from_row(row, row["prompts"]))
        sampled.sort(key=lambda episode: episode.index)
        for episode in sampled:
            assign_credit(episode)
        kept = set(totals["kept_indices"])
        return Batch(
            sampled=sampled,
            kept=[episode for episode in sampled if episode.index in kept],
            kept_indices=totals["kept_indices"],
            num_prompts=totals["num_prompts"],
            num_effective=totals["num_effective"],
            num_cancelled=totals["num_cancelled"],
        )

    def _read_totals(self, step: int) -> dict[str, Any]:
        """Return what is recorded of the whole batch, once the files of all ranks are readable."""
        path = trace_path(self.folder, step + 1, 0)
        try:
            totals: dict[str, Any] = json.loads(pq.read_schema(path).metadata[b"batch"])
            for rank in range(totals["ranks"]):
                path = trace_path(self.folder, step + 1, rank)
                pq.read_schema(path)
        except (OSError, pa.ArrowException, TypeError, KeyError, ValueError) as error:
            raise UserError(
                f"rollout.record.read {self.folder!r}: no record of step {step + 1} at {path} "
                f"({error}): record as many steps as run.steps with rollout.record.write, or lower "
                "run.steps"
            ) from error
        return totals


def _record_row(episode: Episode) -> dict[str, Any]:
    groups = [episode.search, *episode.aggregation]
    prompts = [np.asarray(group[0].prompt_ids, dtype=np.int32) for group in groups]
    return episode_row(episode) | {"prompts": prompts}
