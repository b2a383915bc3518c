"""Steps' batches on disk: recorded as they are collected, and replayed without an engine.

For debugging, for timing the trainer alone, and for comparing policies on the same episodes. A replay may have another
number of ranks, another policy or another objective: credit is assigned anew.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spiral_mega.algorithm.objectives import Objective
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.rollout.batch import Batch
from spiral_mega.telemetry.trace_writer import EPISODE, episode_of, episode_row, read_traces, trace_path, write_rows
from spiral_mega.traces import Episode

RECORD = pa.schema(
    [
        *EPISODE,
        pa.field("draw", pa.int32()),
        pa.field("prompts", pa.list_(pa.list_(pa.int32()))),  # of the search, then of each set
    ]
)


class Collector(Protocol):
    """Where a step's batch comes from; collective."""

    def collect(self, step: int) -> Batch:
        """This rank's part of the batch of `step`, with credit assigned."""


class Recorder:
    """Writes down what `collector` collects, a file a step and rank, under `folder`/traces."""

    def __init__(self, collector: Collector, folder: str, runtime: Runtime) -> None:
        self.collector, self.folder, self.runtime = collector, folder, runtime

    def collect(self, step: int) -> Batch:
        batch = self.collector.collect(step)
        facts = {
            "kept_draws": batch.kept_draws,
            "draws": batch.draws,
            "effective": batch.effective,
            "cancelled": batch.cancelled,
            "ranks": self.runtime.world_size,
        }
        schema = RECORD.with_metadata({"batch": json.dumps(facts)})
        path = trace_path(self.folder, step + 1, self.runtime.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, batch.sampled, _record_row, schema)
        return batch


class Replayer:
    """Collects what a Recorder wrote under `folder`. Raises UserError when a file of `steps` is missing."""

    def __init__(self, folder: str, steps: range, objective: Objective, runtime: Runtime) -> None:
        self.folder, self.objective, self.runtime = folder, objective, runtime
        for step in steps:
            self._facts(step)

    def collect(self, step: int) -> Batch:
        facts = self._facts(step)
        sampled = []
        for rank in range(facts["ranks"]):
            for row in read_traces(trace_path(self.folder, step + 1, rank)):
                if row["draw"] % self.runtime.world_size == self.runtime.rank:
                    sampled.append((row["draw"], episode_of(row, row["prompts"])))
        sampled.sort(key=lambda each: each[0])
        for _, episode in sampled:
            self.objective.assign(episode)
        return Batch(
            sampled=sampled,
            kept=[(draw, episode) for draw, episode in sampled if draw in set(facts["kept_draws"])],
            kept_draws=facts["kept_draws"],
            draws=facts["draws"],
            effective=facts["effective"],
            cancelled=facts["cancelled"],
        )

    def _facts(self, step: int) -> dict[str, Any]:
        """What is recorded of the batch as a whole, once all its files are there."""
        path = trace_path(self.folder, step + 1, 0)
        try:
            facts: dict[str, Any] = json.loads(pq.read_schema(path).metadata[b"batch"])
            for rank in range(facts["ranks"]):
                path = trace_path(self.folder, step + 1, rank)
                pq.read_schema(path)
        except (OSError, pa.ArrowException, TypeError, KeyError, ValueError) as error:
            raise UserError(
                f"rollout.record.read {self.folder!r}: no record of step {step + 1} at {path} ({error}): record as many "
                "steps as run.steps with rollout.record.write, or lower run.steps"
            ) from error
        return facts


def _record_row(item: tuple[int, Episode]) -> dict[str, Any]:
    draw, episode = item
    groups = [episode.search, *episode.aggregation]
    prompts = [np.asarray(group[0].prompt_ids, dtype=np.int32) for group in groups]
    return episode_row(episode) | {"draw": draw, "prompts": prompts}
