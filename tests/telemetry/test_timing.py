import time
from pathlib import Path

import pytest

from spiral_mega.telemetry import StageTimer, memory_metrics


def test_a_stage_accumulates_until_it_is_popped() -> None:
    timer = StageTimer()
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.02)
    with timer("update"):
        pass
    times = timer.pop()
    assert set(times) == {"time/rollout", "time/update"}
    assert 0.04 <= times["time/rollout"] < 0.4
    assert times["time/update"] < 0.02
    assert timer.pop() == {}


def test_a_stage_that_raises_is_timed_and_the_error_passes() -> None:
    timer = StageTimer()
    with pytest.raises(ValueError, match="in the stage"), timer("verify"):
        raise ValueError("in the stage")
    assert "time/verify" in timer.pop()


def test_queued_work_counts_for_the_stage_that_queued_it() -> None:
    timer = StageTimer(synchronize=lambda: time.sleep(0.02))
    with timer("update"):
        pass
    assert timer.pop()["time/update"] >= 0.02


def test_peak_memory_equals_the_kernels_account_in_gib() -> None:
    peak_gib = memory_metrics()["memory/peak_rss_gib"]
    # The kernel's account, in KiB.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert peak_gib == pytest.approx(int(status["VmHWM"].split()[0]) / 2**20, rel=0.05)
