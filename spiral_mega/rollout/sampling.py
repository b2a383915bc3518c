"""Token sampling with per-trace randomness: uniforms from (seed, position) alone."""

from __future__ import annotations

import numpy as np
import torch


def trace_uniforms(seeds: np.ndarray, position: int) -> np.ndarray:
    """Return uniforms in [0, 1), float64 [B], for seeds [B] at a token position (splitmix64).

    Counter-based: the same seed and position give the same number in any batch, on any device.
    """
    mixed = _splitmix64(seeds.astype(np.uint64))
    with np.errstate(over="ignore"):
        mixed = _splitmix64(mixed + np.uint64(position))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        z = state + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def sample_tokens(
    logits: torch.Tensor, temperature: float, uniforms: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens [B] and their log-probs [B] from logits [B, V] / temperature.

    Inverse transform of the uniforms [B].

    Probabilities are accumulated in float64, so that a large vocabulary does not bias the tail.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    cdf = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    threshold = torch.from_numpy(uniforms).to(cdf.device)[:, None] * cdf[:, -1:]
    # right=True takes the first entry above the threshold, so never a token of probability zero.
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
