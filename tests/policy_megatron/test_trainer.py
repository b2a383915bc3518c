"""The whole trainer on megatron-core: the same loop and command, stopped and resumed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import TrainingRun

CONFIG, MODULE = "configs/demo_megatron.yaml", "tests.support.megatron_on_cpu"


@pytest.mark.slow
def test_a_run_in_two_parts_is_bit_for_bit_the_run_in_one(tmp_path: Path) -> None:
    whole = TrainingRun(tmp_path / "whole", "run.steps=3", config=CONFIG, module=MODULE).finish()
    for steps in (1, 3):
        parts = TrainingRun(tmp_path / "parts", f"run.steps={steps}", config=CONFIG, module=MODULE).finish()
    assert len(whole.metrics()) == 3
    assert parts.metrics() == whole.metrics()
    for record in whole.metrics():
        assert record["sampler/log_ratio_abs_max"] < 1e-4  # the engine had the weights that were trained
        assert record["optim/updates"] == 1
    ours, theirs = (load_file(run.folder / "model" / "model.safetensors") for run in (parts, whole))
    start = load_file("configs/demo/model/model.safetensors")
    assert ours.keys() == theirs.keys() == start.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any(torch.equal(ours[name], start[name]) for name in ours)
