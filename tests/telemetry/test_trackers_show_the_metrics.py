import math
from contextlib import suppress
from pathlib import Path

import pytest
from readers import tensorboard_scalars, wandb_history

from spiral_mega.config.schema import TelemetryConfig
from spiral_mega.telemetry import Telemetry

BOTH = TelemetryConfig(wandb="a-project", tensorboard=True)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def live(run_dir: Path, config: TelemetryConfig, steps: range, value: float) -> None:
    with Telemetry(run_dir, config, 10, "a-run", {"seed": 3}) as telemetry:
        for step in steps:
            telemetry.log(step, {"reward/search": value, "optim/grad_norm": math.nan})


def test_a_resumed_run_stays_the_same_run_in_both_trackers(tmp_path: Path) -> None:
    live(tmp_path, BOTH, range(1, 6), 1.0)
    live(tmp_path, BOTH, range(4, 8), 2.0)  # resumed after step 3

    runs = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    histories = [wandb_history(path) for path in runs]
    assert len({run_id for run_id, _, _ in histories}) == 1
    assert [exit_code for _, _, exit_code in histories] == [0] * len(runs)
    rows = [row for _, rows, _ in histories for row in rows]
    assert {row["_step"] for row in rows} == set(range(1, 8))
    assert all(math.isnan(row["optim/grad_norm"]) for row in rows)

    scalars = tensorboard_scalars(tmp_path / "tensorboard")
    expected = [(step, 1.0) for step in range(1, 4)] + [(step, 2.0) for step in range(4, 8)]
    assert scalars["reward/search"] == expected


def test_a_run_that_raised_is_marked_as_failed(tmp_path: Path) -> None:
    with suppress(RuntimeError), Telemetry(tmp_path, BOTH, 10, "a-run", {}) as telemetry:
        telemetry.log(1, {"reward/search": 1.0})
        raise RuntimeError
    [path] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert wandb_history(path)[2] == 1


def test_a_tracker_receives_what_it_missed_when_the_run_resumes(tmp_path: Path) -> None:
    blocked = tmp_path / "tensorboard"
    blocked.write_text("a file where the folder should be")
    live(tmp_path, TelemetryConfig(tensorboard=True), range(1, 4), 1.0)
    blocked.unlink()
    live(tmp_path, TelemetryConfig(tensorboard=True), range(4, 6), 1.0)
    assert [step for step, _ in tensorboard_scalars(blocked)["reward/search"]] == [1, 2, 3, 4, 5]


def test_ranks_that_are_not_enabled_leave_no_trace(tmp_path: Path) -> None:
    with Telemetry(tmp_path, BOTH, 10, "a-run", {}, enabled=False) as telemetry:
        telemetry.log(1, {"reward/search": 1.0})
    assert not list(tmp_path.iterdir())
