"""The example of the whole algorithm runs: losses are finite, weights move, and the engine samples from them."""

import math
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.minimal_loop import main


@pytest.fixture(autouse=True)
def same_state_of_random_numbers() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def test_a_few_steps_move_the_weights_and_stay_finite() -> None:
    policy, history = main(steps=2, num_problems=4)
    assert len(history) == 2
    for metrics in history:
        assert all(math.isfinite(value) for value in metrics.values())
        assert 0 <= metrics["reward/search"] <= 1
        assert 0 <= metrics["reward/aggregation"] <= 1
        assert metrics["optim/grad_norm"] > 0
    start = AutoModelForCausalLM.from_pretrained(
        "configs/demo/model", dtype=torch.float32
    ).state_dict()
    moved = [
        name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, start[name])
    ]
    assert set(moved) == set(start)


@pytest.mark.slow
def test_it_learns() -> None:
    _, history = main()
    for component in ("search", "aggregation"):
        rewards = [metrics[f"reward/{component}"] for metrics in history]
        assert sum(rewards[-5:]) > 1.2 * sum(rewards[:5]), rewards
