"""Updates on megatron-core are those of torch's AdamW on the whole model, and of the policy on FSDP2."""

import math

import pytest
import torch

from tests.policy.cases import LR_FACTORS, OPTIMIZER
from tests.policy.reference import Tensors, load_model, train
from tests.policy_megatron.cases import UPDATES, Lab
from tests.policy_megatron.expected import by_checkpoint_name
from tests.policy_megatron.test_gradients import largest_difference

pytestmark = pytest.mark.megatron

WITH_FSDP = [name for name, (_, model, _) in UPDATES.items() if model == "qwen3 tied"]


def expected_updates(
    lab: Lab, model: str, skipped: int | None = None
) -> list[tuple[float, Tensors]]:
    """Norm and weights after each batch but the one to skip, at the learning rates of warm-up and cosine decay."""
    settings = {
        "weight_decay": OPTIMIZER["weight_decay"],
        "eps": OPTIMIZER["eps"],
        "clip": OPTIMIZER["max_grad_norm"],
    }
    batches = [
        (OPTIMIZER["lr"] * LR_FACTORS[i], b)
        for i, b in enumerate(lab.batches(model))
        if i != skipped
    ]
    steps = train(load_model(lab.model(model)), batches, **settings)
    return [(norm, by_checkpoint_name(weights)) for norm, weights in steps]


@pytest.mark.parametrize("name", UPDATES)
def test_three_updates_are_those_of_adamw_on_the_whole_model(lab: Lab, name: str) -> None:
    expected = expected_updates(lab, UPDATES[name][1])
    assert (
        max(norm for norm, _ in expected) > OPTIMIZER["max_grad_norm"]
    )  # or clipping would not be tested
    for rank in lab.of("updates", name):
        for i, (step, (norm, weights)) in enumerate(zip(rank["clean"], expected, strict=True)):
            assert step["metrics"]["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
            assert step["metrics"]["optim/lr"] == pytest.approx(OPTIMIZER["lr"] * LR_FACTORS[i])
            assert largest_difference(step["weights"], weights) < 1e-6


@pytest.mark.parametrize("name", WITH_FSDP)
def test_three_updates_are_those_of_the_fsdp_policy(lab: Lab, name: str) -> None:
    rank = lab.of("updates", name)[0]
    for ours, theirs in zip(rank["clean"], rank["fsdp"], strict=True):
        assert largest_difference(ours["weights"], theirs["weights"]) < 1e-5
        assert ours["metrics"].keys() == theirs["metrics"].keys()
        for metric in ("optim/grad_norm", "train/loss", "sampler/kl", "entropy/trained"):
            assert ours["metrics"][metric] == pytest.approx(
                theirs["metrics"][metric], rel=1e-6, abs=1e-6
            ), metric


@pytest.mark.parametrize("name", UPDATES)
def test_a_batch_without_a_finite_gradient_changes_nothing(lab: Lab, name: str) -> None:
    expected = expected_updates(lab, UPDATES[name][1], skipped=1)
    for rank in lab.of("updates", name):
        first, second, third = rank["poisoned"]
        assert [step["metrics"]["optim/skipped"] for step in rank["poisoned"]] == [0, 1, 0]
        assert not math.isfinite(second["metrics"]["optim/grad_norm"])
        assert all(
            torch.equal(second["weights"][key], first["weights"][key]) for key in first["weights"]
        )
        assert largest_difference(third["weights"], expected[-1][1]) < 1e-6
