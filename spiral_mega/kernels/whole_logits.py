"""Log-probs from whole logits, with gradients by autograd: the truth for tests, and fastest for small inputs."""

from __future__ import annotations

import torch
from torch.nn import functional

from spiral_mega.kernels.logits import LinearLogprob, Logits, accumulator_dtype


def linear_logprob(logits: Logits, targets: torch.Tensor, with_entropy: bool) -> LinearLogprob:
    """Compute log-prob, log-sum-exp and entropy [T] of all logits at once, in the accumulators' dtype."""
    wide = accumulator_dtype(logits.terms[0].input.dtype)
    logits_TV = torch.stack(
        [input_TK.to(wide) @ weight_VK.to(wide).T for input_TK, weight_VK in logits.terms]
    ).sum(0)
    if logits.bias is not None:
        logits_TV = logits_TV + logits.bias.to(wide)
    if logits.softcap is not None:
        logits_TV = logits.softcap * torch.tanh(logits_TV / logits.softcap)
    logits_TV = logits_TV / logits.temperature
    logprobs_TV = logits_TV.log_softmax(-1)
    entropy = None
    if with_entropy:
        # A token of probability 0 adds nothing; as 0 * -inf it would add NaN.
        entropy = -(logprobs_TV.exp() * logprobs_TV.masked_fill(logprobs_TV == -torch.inf, 0)).sum(
            -1
        )
    # nll_loss and not gather: its result is no view, about which FSDP would warn.
    logprob = -functional.nll_loss(logprobs_TV, targets.long(), reduction="none")
    return LinearLogprob(logprob, logits_TV.logsumexp(-1), entropy)
