"""A resumed run continues bit for bit in its own layout, and with the same numbers in any other."""

import pytest
import torch

from tests.policy_megatron.cases import LORA_RESUMES, OTHERS, RESUMES, Lab
from tests.policy_megatron.test_gradients import largest_difference

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("name", RESUMES | LORA_RESUMES)
def test_a_resumed_run_continues_bit_for_bit(lab: Lab, name: str) -> None:
    for rank in lab.results[2]:
        found = rank[f"interrupted: {name}"]
        for ours, theirs in zip(found["resumed"], found["whole"][1:], strict=True):
            assert all(
                torch.equal(ours["weights"][key], theirs["weights"][key])
                for key in theirs["weights"]
            )
            assert ours["metrics"] == theirs["metrics"]


@pytest.mark.parametrize(("name", "other"), OTHERS)
def test_another_layout_resumes_with_the_same_numbers(lab: Lab, name: str, other: int) -> None:
    whole = lab.results[2][0][f"interrupted: {name}"]["whole"]
    ranks, _ = (RESUMES | LORA_RESUMES)[name][1][1 + other]
    for rank in lab.results[ranks]:
        for ours, theirs in zip(rank[f"resumed: {name} {other}"], whole[1:], strict=True):
            assert largest_difference(ours["weights"], theirs["weights"]) < 1e-6
            for metric in ("train/loss", "optim/grad_norm", "optim/lr"):
                assert ours["metrics"][metric] == pytest.approx(
                    theirs["metrics"][metric], rel=1e-5
                ), metric
