"""The benchmark of the fused head compares things that compute the same."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.linear_logprob import CONTENDERS, inputs
from tests.support.ranks import ROOT


@pytest.mark.parametrize(
    "name", ["ours", "ours, entropy without gradient", "F.linear_cross_entropy, no entropy"]
)
def test_contenders_give_what_whole_logits_give(name: str) -> None:
    given = inputs(70, 32, 500, torch.float32, "cpu")
    expected = CONTENDERS["log_softmax"](*given)
    for found, right in zip(CONTENDERS[name](*given), expected, strict=False):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["floor", "ours"])
def test_one_run_reports_time_and_memory(name: str) -> None:
    shape = ["--tokens", "96", "--hidden", "16", "--vocab", "4000"]
    command = [sys.executable, "-m", "benchmarks.linear_logprob", *shape, "--child", name]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed).keys() == {"wall", "cpu", "memory"}
