"""The plain way: all logits at once, gradients by autograd. The truth for tests, and fastest for little work."""

from __future__ import annotations

import torch
from torch.nn import functional

from spiral_mega.kernels.logits import LinearLogprob, Logits, accumulator


def linear_logprob(logits: Logits, targets: torch.Tensor, with_entropy: bool) -> LinearLogprob:
    dtype = accumulator(logits.terms[0].input.dtype)
    values = torch.stack([x.to(dtype) @ w.to(dtype).T for x, w in logits.terms]).sum(0)
    if logits.bias is not None:
        values = values + logits.bias.to(dtype)
    if logits.softcap is not None:
        values = logits.softcap * torch.tanh(values / logits.softcap)
    values = values / logits.temperature
    logprobs = values.log_softmax(-1)
    entropy = None
    if with_entropy:
        # A token of probability 0 adds nothing; as 0 * -inf it would add NaN.
        entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0)).sum(-1)
    of_targets = -functional.nll_loss(logprobs, targets.long(), reduction="none")  # no view, which FSDP would warn of
    return LinearLogprob(of_targets, values.logsumexp(-1), entropy)
