"""The whole trainer on megatron-core: the same loop and command, stopped, killed and resumed."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import TrainingRun

CONFIG, MODULE = "configs/demo_megatron.yaml", "tests.support.megatron_on_cpu"


pytestmark = [pytest.mark.slow, pytest.mark.megatron]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    return TrainingRun(folder, "run.steps=3", config=CONFIG, module=MODULE).finish()


def assert_same_run(left: TrainingRun, right: TrainingRun) -> None:
    assert left.metrics() == right.metrics()
    assert left.traces() == right.traces()
    ours, theirs = (load_file(run.folder / "model" / "model.safetensors") for run in (left, right))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_in_two_parts_is_bit_for_bit_the_run_in_one(
    whole: TrainingRun, tmp_path: Path
) -> None:
    for steps in (1, 3):
        parts = TrainingRun(
            tmp_path / "parts", f"run.steps={steps}", config=CONFIG, module=MODULE
        ).finish()
    assert len(whole.metrics()) == 3
    assert_same_run(parts, whole)
    for record in whole.metrics():
        assert (
            record["sampler/log_ratio_abs_max"] < 1e-4
        )  # the engine had the weights that were trained
        assert record["optim/updates"] == 1
    trained = load_file(whole.folder / "model" / "model.safetensors")
    start = load_file("configs/demo/model/model.safetensors")
    assert trained.keys() == start.keys()
    assert not any(torch.equal(trained[name], start[name]) for name in trained)


def test_a_run_one_of_whose_ranks_was_killed_resumes_bit_for_bit(
    whole: TrainingRun, tmp_path: Path
) -> None:
    run = TrainingRun(tmp_path / "run", "run.steps=3", config=CONFIG, module=MODULE)
    run.wait_for(lambda: (run.folder / "checkpoints" / "step_000002").exists())
    os.kill(run.rank_pids()[-1], signal.SIGKILL)
    run.finish(status=1)
    assert not run.reached(3), "it was over before the rank was killed: nothing was tested"
    again = TrainingRun(tmp_path / "run", "run.steps=3", config=CONFIG, module=MODULE).finish()
    assert "resumed from step 2" in again.output()
    assert_same_run(again, whole)
