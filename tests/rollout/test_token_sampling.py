"""The randomness of a trace is its own: uniform, independent between seeds and positions, the same in any company."""

import numpy as np
import pytest
import torch

from spiral_mega.rollout.sampling import sample_tokens, trace_uniforms
from spiral_mega.seeds import SEED_BITS, derive_seed
from tests.rollout.engine_models import chi_square_p


def uniforms(seeds: list[int], positions: int) -> np.ndarray:
    """[seeds, positions]"""
    array = np.array(seeds, dtype=np.uint64)
    return np.stack([trace_uniforms(array, position) for position in range(positions)], axis=1)


def kolmogorov_smirnov(values: np.ndarray) -> float:
    """sqrt(n) times the largest distance from the uniform distribution; above 1.95 with probability 0.001."""
    ordered = np.sort(values.ravel())
    n = len(ordered)
    steps = np.arange(n + 1) / n
    return float(np.sqrt(n) * max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))


SEED_FAMILIES = {
    "consecutive": list(range(400)),
    "large": [2**SEED_BITS - 200 + i for i in range(400)],
    "hashed": [derive_seed(0, 7, f"problem/{i}", "search") for i in range(400)],
    "multiples_of_the_mixing_constant": [
        (i * 0x9E3779B97F4A7C15) % 2**SEED_BITS for i in range(400)
    ],
}


@pytest.mark.parametrize("family", SEED_FAMILIES)
def test_uniforms_are_uniform_over_positions_and_over_seeds(family):
    drawn = uniforms(SEED_FAMILIES[family], 500)
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    assert kolmogorov_smirnov(drawn) < 1.95
    scores = [kolmogorov_smirnov(row) for row in drawn] + [
        kolmogorov_smirnov(column) for column in drawn.T
    ]
    assert np.mean(np.array(scores) > 1.36) < 0.08, "5 % of single rows and columns lie beyond 1.36"


@pytest.mark.parametrize("family", SEED_FAMILIES)
def test_neighbouring_seeds_and_positions_are_not_correlated(family):
    drawn = uniforms(SEED_FAMILIES[family], 500) - 0.5
    pairs = {
        "next position": (drawn[:, :-1], drawn[:, 1:]),
        "next seed": (drawn[:-1], drawn[1:]),
        "one seed on, one position back": (drawn[:-1, 1:], drawn[1:, :-1]),
        "one seed on, one position on": (drawn[:-1, :-1], drawn[1:, 1:]),
    }
    for name, (left, right) in pairs.items():
        correlation = (left * right).mean() * 12
        assert abs(correlation) * np.sqrt(left.size) < 4, name


def test_no_two_traces_share_a_run_of_uniforms():
    drawn = uniforms(list(range(300)) + [2**61 + i for i in range(300)], 300)
    assert len(np.unique(drawn)) == drawn.size


def test_a_uniform_depends_on_its_seed_and_position_alone():
    seeds = [3, 2**SEED_BITS - 1 + 63, 77, 2**40]
    together = uniforms(seeds, 20)
    for i, seed in enumerate(seeds):
        assert (uniforms([seed], 20)[0] == together[i]).all()
    assert (uniforms(seeds[::-1], 20) == together[::-1]).all()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_tokens_follow_the_softmax_at_the_temperature(temperature):
    logits = torch.linspace(-3, 3, 40)[
        torch.randperm(40, generator=torch.Generator().manual_seed(1))
    ]
    n = 40_000
    tokens, logprobs = sample_tokens(
        logits.expand(n, -1), temperature, trace_uniforms(np.arange(n), 0)
    )
    exact = torch.softmax(logits.double() / temperature, -1)
    assert chi_square_p(torch.bincount(tokens, minlength=40), n * exact) > 1e-3
    assert torch.allclose(logprobs.double(), exact.log()[tokens], atol=1e-5)


def test_rare_tokens_of_a_large_vocabulary_are_each_within_reach():
    """4e-8 apiece, less than a float32 tells apart near 1: uniforms that far apart must give one after the other."""
    size, n = 150_000, 256
    logits = torch.full((size,), -17.0)
    logits[0] = 0.0
    each = float(torch.softmax(logits.double(), -1)[1])
    picks = 1 - each * (np.arange(n)[::-1] + 1000.5)
    tokens, _ = sample_tokens(logits.expand(n, -1), 1.0, picks)
    assert (tokens.diff() == 1).all()
    assert abs(int(tokens[-1]) - (size - 1001)) <= 3, "but for the rounding of the softmax itself"


@pytest.mark.parametrize("banned", [[0], [4], [0, 1, 2], [2, 3, 4], [1, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_probability_zero_is_never_drawn_even_at_the_ends_of_the_unit_interval(
    banned, dtype
):
    torch.manual_seed(0)
    logits = torch.randn(300, 5).to(dtype)
    logits[:, banned] = -torch.inf
    for uniform in (0.0, 2.0**-53, 0.5, trace_uniforms_at_most()):
        tokens, logprobs = sample_tokens(logits, 1.0, np.full(300, uniform))
        assert torch.isfinite(logprobs).all()
        assert not set(tokens.tolist()) & set(banned)


def trace_uniforms_at_most() -> float:
    """The largest number that `trace_uniforms` can give, found from its grid: all are multiples of the spacing."""
    drawn = trace_uniforms(np.arange(100_000), 3)
    spacing = next(2.0**-bits for bits in range(1, 80) if (drawn * 2.0**bits % 1 == 0).all())
    return 1 - spacing


def test_a_temperature_near_zero_takes_the_most_likely_token():
    torch.manual_seed(0)
    logits = torch.randn(500, 30)
    tokens, logprobs = sample_tokens(logits, 1e-6, trace_uniforms(np.arange(500), 0))
    assert (tokens == logits.argmax(-1)).all()
    assert (logprobs.abs() < 1e-6).all()
