"""Log-prob and entropy of tokens from logits, a few rows at a time, so that float32 copies of the logits stay small."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

ROWS = 1024


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [R] of `targets` [R] and entropies [R], float32, under softmax(logits [R, V] / temperature).

    Differentiable in the log-probs; entropies carry no gradient. Backward computes each chunk of rows again.
    """
    chunks = [
        checkpoint(
            _chunk, logits[start : start + ROWS], targets[start : start + ROWS], temperature, use_reentrant=False
        )
        for start in range(0, max(len(targets), 1), ROWS)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_RV = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        # A token of probability 0 adds nothing; as 0 * -inf it would add NaN.
        entropy = -(logprobs_RV.exp() * logprobs_RV).nan_to_num(nan=0.0).sum(-1)
    return logprobs_RV.gather(1, targets[:, None])[:, 0], entropy
