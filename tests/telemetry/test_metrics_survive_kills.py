import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spiral_mega.telemetry.metrics_file import (
    MetricsFile,
    decode_record,
    encode_record,
    read_metrics,
)

LIFE = """
import sys
from pathlib import Path
from spiral_mega.telemetry.metrics_file import MetricsFile
file = MetricsFile(Path(sys.argv[1]) / "metrics.jsonl")
for step in range(1, 4):
    file.append(step, {"reward": step})
print("written", flush=True)
sys.stdin.read()
"""


def values(run_dir: Path, name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in read_metrics(run_dir) if name in record]


def append(run_dir: Path, *records: tuple[int, dict[str, float]]) -> None:
    file = MetricsFile(run_dir / "metrics.jsonl")
    for step, metrics in records:
        file.append(step, metrics)
    file.close()


def test_nothing_that_was_logged_is_lost_to_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIFE, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert values(tmp_path, "reward") == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "ti', b'{"step": 2, "time": 1.0, "reward": 2.0}', b"\0" * 9, b"\xff"]
)
def test_an_unfinished_last_line_is_neither_misread_nor_joined_to_the_next(
    tmp_path: Path, torn: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    append(tmp_path, (1, {"reward": 1.0}))
    with open(path, "ab") as file:
        file.write(torn)
    whole = [(2, 2.0)] if torn.endswith(b"}") else []
    assert values(tmp_path, "reward") == [(1, 1.0), *whole]
    append(tmp_path, (3, {"reward": 3.0}))
    assert values(tmp_path, "reward") == [(1, 1.0), *whole, (3, 3.0)]
    assert torn + b"\n" in path.read_bytes()


def test_nan_and_infinities_pass_through_strict_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = encode_record(1, 2.0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1})
    json.loads(line, parse_constant=refuse)
    record = decode_record(line)
    assert record is not None
    assert math.isnan(record.pop("a"))
    assert record == {"step": 1, "time": 2.0, "b": math.inf, "c": -math.inf, "d": 0.1}


def test_what_is_not_a_metric_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="'reward'"):
        encode_record(1, 0.0, {"reward": "high"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'step'"):
        encode_record(1, 0.0, {"step": 2.0})


def test_after_a_resume_only_the_current_history_is_read(tmp_path: Path) -> None:
    append(tmp_path, *((step, {"reward": float(step)}) for step in range(1, 8)))
    append(
        tmp_path, (4, {"reward": 40.0}), (5, {"reward": 50.0})
    )  # resumed after step 3, killed again at 5
    assert values(tmp_path, "reward") == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50)]
    append(tmp_path, (5, {"reward": 51.0}))
    assert values(tmp_path, "reward")[-1] == (5, 51)


def test_records_of_one_step_are_merged(tmp_path: Path) -> None:
    append(tmp_path, (1, {"reward": 1.0}), (1, {"eval/accuracy": 0.5}))
    assert values(tmp_path, "reward") == [(1, 1.0)]
    assert values(tmp_path, "eval/accuracy") == [(1, 0.5)]


def test_a_record_that_a_full_disk_truncates_is_an_error_and_not_half_a_line(
    tmp_path: Path,
) -> None:
    """The file takes what still fits of a line, and the rest is refused."""
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from spiral_mega.telemetry.metrics_file import MetricsFile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # in place of a disk of 100 bytes\n"
        "file = MetricsFile(Path(sys.argv[1]))\n"
        "[file.append(step, {'reward/search': 0.5}) for step in range(3)]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "metrics.jsonl"], capture_output=True, text=True
    )
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert (tmp_path / "metrics.jsonl").stat().st_size == 100
