"""A policy saved and loaded goes on as if nothing had happened, also on another number of ranks."""

from typing import Any

import pytest
import torch

from tests.policy.cases import UPDATES, Lab


def same_updates(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether metrics and weights are equal to the last bit, update for update."""
    pairs = list(zip(found["after"], expected["after"], strict=True))
    assert pairs
    weights = all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs
    )
    return weights and found["metrics"] == expected["metrics"]


def last(run: dict[str, Any], count: int) -> dict[str, Any]:
    return {key: values[-count:] for key, values in run.items()}


@pytest.mark.parametrize("name", UPDATES)
def test_saving_does_not_disturb_training(lab: Lab, name: str) -> None:
    runs = lab.results[2][0][f"interrupted: {name}"]
    assert same_updates(runs["saving"], runs["undisturbed"])


@pytest.mark.parametrize("name", UPDATES)
def test_training_goes_on_bit_for_bit_after_a_resume(lab: Lab, name: str) -> None:
    runs = lab.results[2][0][f"interrupted: {name}"]
    assert same_updates(runs["from 1"], last(runs["undisturbed"], 2))


@pytest.mark.parametrize("name", UPDATES)
def test_a_checkpoint_before_the_first_update_is_as_good_as_the_start(lab: Lab, name: str) -> None:
    runs = lab.results[2][0][f"interrupted: {name}"]
    assert same_updates(runs["from 0"], runs["undisturbed"])


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("name", UPDATES)
def test_a_checkpoint_of_two_ranks_goes_on_elsewhere(lab: Lab, name: str, world_size: int) -> None:
    found = lab.results[world_size][0][f"resumed: {name}"]
    expected = last(lab.results[2][0][f"interrupted: {name}"]["undisturbed"], 2)
    for key in ("train/loss", "optim/grad_norm", "optim/lr"):
        assert [m[key] for m in found["metrics"]] == pytest.approx(
            [m[key] for m in expected["metrics"]], abs=1e-5
        )
    for weights, others in zip(found["after"], expected["after"], strict=True):
        assert max(float((weights[key] - others[key]).abs().max()) for key in others) < 1e-5
