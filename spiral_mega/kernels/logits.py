"""The data that the kernels share: logits, of which a tile at a time is computed, their statistics and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist


class LinearLogprob(NamedTuple):
    """For each row: log-prob of its target, log-sum-exp, and entropy in nats (None unless asked for). All [T]."""

    logprob: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor | None


class Term(NamedTuple):
    """One of the products whose sum the logits are: input [T, K] @ weight [V, K]^T."""

    input: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class Logits:
    """A description of logits [T, V], of which tiles are computed.

        logits = softcap * tanh(z / softcap) / temperature,    z = sum of input @ weight^T over `terms` + bias

    Without `softcap`, logits = z / temperature. `saved` [T, V]: memory where the forward pass
    stores them for the backward pass, in the dtype of accumulators, if they are few.
    """

    terms: tuple[Term, ...]
    bias: torch.Tensor | None
    temperature: float
    softcap: float | None
    saved: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        input_TK, weight_VK = self.terms[0]
        return len(input_TK), len(weight_VK)

    def rows(self, rows: slice | torch.Tensor) -> Logits:
        terms = tuple(Term(input_TK[rows], weight_VK) for input_TK, weight_VK in self.terms)
        return replace(self, terms=terms, saved=None if self.saved is None else self.saved[rows])

    def columns(self, columns: slice) -> Logits:
        """Select vocabulary entries; their weights are cast to the dtype of the inputs, which may be wider."""
        terms = tuple(
            Term(input_TK, weight_VK[columns].to(input_TK.dtype))
            for input_TK, weight_VK in self.terms
        )
        bias = None if self.bias is None else self.bias[columns]
        return replace(
            self,
            terms=terms,
            bias=bias,
            saved=None if self.saved is None else self.saved[:, columns],
        )


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Statistics(NamedTuple):
    """For the logits x of each row: m = max, sum of exp(x - m), sum of (x - m) exp(x - m), and the
    target's x.

    All [T], or [S, T] for S parts of the vocabulary. m is finite even where x is all -inf, so that
    no difference is NaN; the target's logit is -inf in every part that does not hold it.
    """

    max: torch.Tensor
    sum: torch.Tensor
    dot: torch.Tensor
    target: torch.Tensor

    def relative_to(self, maximum: torch.Tensor) -> Statistics:
        """Return the same for another m, at least as large."""
        shift = self.max - maximum
        scale = shift.exp()
        return Statistics(
            maximum, scale * self.sum, scale * (self.dot + shift * self.sum), self.target
        )

    def merge_parts(self) -> Statistics:
        """Merge [S, T] of the parts of a vocabulary into [T] of the whole."""
        maximum = self.max.amax(0)
        _, total, dot, target = self.relative_to(maximum)
        return Statistics(maximum, total.sum(0), dot.sum(0), target.amax(0))

    def merge_over(self, group: dist.ProcessGroup) -> Statistics:
        """Merge those of each rank's shard of the vocabulary; equal on all ranks afterwards.

        Exchanges 4 T numbers: an all-reduce by maximum and one by sum, of 2 T each.
        """
        maxima = torch.stack([self.max, self.target])
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        _, total, dot, _ = self.relative_to(maxima[0])
        sums = torch.stack([total, dot])
        dist.all_reduce(sums, group=group)
        return Statistics(maxima[0], sums[0], sums[1], maxima[1])

    def outputs(self, with_entropy: bool) -> LinearLogprob:
        """Compute log-prob = x - m - log sum, log-sum-exp = m + log sum, entropy = log sum - dot / sum."""
        log_sum = self.sum.log()
        entropy = log_sum - self.dot / self.sum if with_entropy else None
        return LinearLogprob(self.target - self.max - log_sum, self.max + log_sum, entropy)


@dataclass(frozen=True, slots=True)
class LogitGradient:
    """A description of the gradient of each row's logits x, of which tiles are computed.

        dx = onehot(target) * onehot_coef + p * (softmax_coef - entropy_coef * log p),    p = softmax(x)

    With upstream gradients a, b, c of log-prob, log-sum-exp and entropy h: d log-prob = onehot - p,
    d log-sum-exp = p, d h = -p (log p + h); hence onehot_coef = a, softmax_coef = b - a - c h,
    entropy_coef = c. All [T]; `entropy_coef` is None if the entropy has no upstream gradient. log p
    = x - logsumexp. Targets count from the first vocabulary entry at hand; those outside belong to
    another part.
    """

    targets: torch.Tensor
    logsumexp: torch.Tensor
    onehot_coef: torch.Tensor
    softmax_coef: torch.Tensor
    entropy_coef: torch.Tensor | None

    def rows(self, rows: slice | torch.Tensor) -> LogitGradient:
        return LogitGradient(
            self.targets[rows],
            self.logsumexp[rows],
            self.onehot_coef[rows],
            self.softmax_coef[rows],
            None if self.entropy_coef is None else self.entropy_coef[rows],
        )

    def columns(self, columns: slice) -> LogitGradient:
        return replace(self, targets=self.targets - columns.start)

    def nonzero_rows(self) -> torch.Tensor:
        """Return the indices of the rows that have any gradient."""
        nonzero = (self.onehot_coef != 0) | (self.softmax_coef != 0)
        if self.entropy_coef is not None:
            nonzero |= self.entropy_coef != 0
        return nonzero.nonzero()[:, 0]
