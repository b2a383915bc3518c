"""metrics.jsonl, the record of a run from which trackers, reports and plots are made: one line for
each record.

    {"step": int, "time": seconds since 1970, <metric>: number, ...}

JSON has no NaN or infinity: they are written as the strings "nan", "inf" and "-inf", which
`decode_record` converts back to floats.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

log = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
RESERVED = ("step", "time")


class MetricsFile:
    """Appends records to `path`; each is with the operating system when `append` returns.

    A last line that a killed run left unfinished keeps its bytes and gets a line end, so that the
    next record starts a new line.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        if self._file.seek(0, os.SEEK_END) > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def append(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write one record. Raises ValueError for a reserved name, TypeError for a non-number, OSError."""
        rest = memoryview(encode_record(step, time.time(), metrics))
        while rest:  # a full disk accepts a part before it refuses
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()


def encode_record(step: int, seconds: float, metrics: Mapping[str, SupportsFloat]) -> bytes:
    """Return the record as one line, newline included."""
    record: dict[str, Any] = {"step": int(step), "time": seconds}
    for name, value in metrics.items():
        if name in RESERVED:
            raise ValueError(
                f"a metric cannot be called {name!r}: every record already has that field"
            )
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metric {name!r} is not a number: {value!r}") from error
        record[name] = number if math.isfinite(number) else str(number)
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def decode_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of one line; None for a line that a killed run left unfinished."""
    try:
        record = json.loads(line)
        return {
            name: int(value) if name == "step" else float(value) for name, value in record.items()
        }
    except (ValueError, TypeError, AttributeError):
        return None


def new_records(path: Path, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of `path` from byte `offset` on, each with the offset of the next line."""
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return  # still being written
            offset += len(line)
            record = decode_record(line)
            if record is not None:
                yield offset, record


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the history of the run's current weights: one record for each step, in order of steps.

    Records of the same step are merged; later values win. A record of an earlier step than its
    predecessor means that the run resumed there: records from that step on are dropped, since they
    describe weights that were lost. Unfinished lines are skipped and counted in a warning.

    Raises FileNotFoundError when the run has no metrics.
    """
    path = Path(run_dir) / METRICS_NAME
    history: list[dict[str, Any]] = []
    unreadable = 0
    for line in path.read_bytes().splitlines():
        record = decode_record(line)
        if record is None:
            unreadable += 1
            continue
        while history and history[-1]["step"] > record["step"]:
            history.pop()
        if history and history[-1]["step"] == record["step"]:
            history[-1].update(record)
        else:
            history.append(record)
    if unreadable:
        log.warning("%s: skipped %d unfinished lines", path, unreadable)
    return history
