"""Read back what the real trackers wrote."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_records(run_file: Path) -> Iterator[Any]:
    """The records of an offline run: protocol buffers in LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = run_file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def wandb_history(run_file: Path) -> tuple[str, list[dict[str, Any]], int]:
    """Run id, rows of the history, and exit code."""
    run_id, rows, exit_code = "", [], -1
    for record in wandb_records(run_file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id = record.run.run_id
        elif kind == "history":
            rows.append(
                {
                    "/".join(i.nested_key) or i.key: json.loads(i.value_json)
                    for i in record.history.item
                }
            )
        elif kind == "exit":
            exit_code = record.exit.exit_code
    return run_id, rows, exit_code


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) pairs by tag, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
