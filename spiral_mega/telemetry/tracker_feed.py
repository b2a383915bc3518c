"""Feed a run's metrics to one tracker, in a separate process.

The queue is metrics.jsonl itself: this process follows the file and records its offset. A tracker
that fails, hangs or cannot reach its server therefore neither delays training nor loses metrics. It
catches up when the run resumes, or by hand:

    echo done | python -m spiral_mega.telemetry.tracker_feed wandb RUN_DIR
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import threading
import time
from pathlib import Path

from spiral_mega.telemetry.atomic import write_json_atomic
from spiral_mega.telemetry.metrics_file import METRICS_NAME, RESERVED, new_records
from spiral_mega.telemetry.trackers import TRACKERS, Tracker, state_path

POLL_S = 0.5


class RunEnd(threading.Thread):
    """Waits for the end of the run: standard input closes, after "done" if it succeeded, or the
    trainer is gone.

    The process then has `grace_s` seconds to finish, after which it exits even if the tracker
    hangs.
    """

    def __init__(self, grace_s: float) -> None:
        super().__init__(daemon=True)
        self.reached = threading.Event()
        self.exit_code = 1
        self._grace_s = grace_s

    def run(self) -> None:
        parent, message = os.getppid(), b""
        # A forked worker may hold the pipe open after the trainer died, so end of file alone is not
        # enough.
        while os.getppid() == parent:
            if select.select([0], [], [], 1.0)[0]:
                read = os.read(0, 64)
                if not read:
                    break
                message += read
        self.exit_code = 0 if message.startswith(b"done") else 1
        self.reached.set()
        time.sleep(self._grace_s)
        print(f"not finished {self._grace_s:g} s after the end of the run", flush=True)
        os._exit(1)


def feed(name: str, run_dir: Path, end: RunEnd) -> None:
    """Feed the tracker until the run has ended and every record is sent. Raises what the tracker raises."""
    path = state_path(run_dir, name)
    state = json.loads(path.read_text(encoding="utf-8"))
    tracker = TRACKERS[name](run_dir, state)
    while True:
        last = end.reached.is_set()  # checked before reading, so that the last record is not missed
        offset = send(tracker, run_dir / METRICS_NAME, state["offset"])
        if offset != state["offset"]:
            state["offset"] = offset
            write_json_atomic(path, state)
        if last:
            break
        end.reached.wait(POLL_S)
    tracker.close(end.exit_code)


def send(tracker: Tracker, path: Path, offset: int) -> int:
    """Send the records after byte `offset`; return the offset after the last of them."""
    for after, record in new_records(path, offset):
        metrics = {metric: value for metric, value in record.items() if metric not in RESERVED}
        tracker.log(record["step"], record["time"], metrics)
        offset = after
    return offset


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tracker", choices=sorted(TRACKERS), help="tracker to feed")
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument(
        "--grace-s", type=float, default=600.0, help="seconds to finish after the end of the run"
    )
    args = parser.parse_args()
    os.nice(5)
    # A scheduler signals every process of the job; this one continues until the trainer has written
    # its last record.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = RunEnd(args.grace_s)
    end.start()
    feed(args.tracker, args.run_dir, end)


if __name__ == "__main__":
    main()
