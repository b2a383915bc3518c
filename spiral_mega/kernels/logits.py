"""What the kernels compute with: logits, whole only where they are few, numbers of each row, gradients of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class LinearLogprob(NamedTuple):
    """Of each row: log-prob of its target, log-sum-exp, and entropy in nats (None unless asked for). All [T]."""

    logprob: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor | None


class Term(NamedTuple):
    """One product in a sum of them: input [T, K] @ weight [V, K]^T."""

    input: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class Logits:
    """logits [T, V] = softcap * tanh((sum of input @ weight^T over `terms` + bias) / softcap) / temperature.

    Without `softcap` the sum itself over temperature. This only names them; a tile is what gets computed. `kept`: where
    the forward pass leaves them for the backward pass, in the type of accumulators, if they are few.
    """

    terms: tuple[Term, ...]
    bias: torch.Tensor | None
    temperature: float
    softcap: float | None
    kept: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        input, weight = self.terms[0]
        return len(input), len(weight)

    def rows(self, rows: slice | torch.Tensor) -> Logits:
        terms = tuple(Term(x[rows], w) for x, w in self.terms)
        return replace(self, terms=terms, kept=None if self.kept is None else self.kept[rows])

    def columns(self, columns: slice) -> Logits:
        """Some vocabulary entries; their weights in the type of the inputs, which may be wider."""
        terms = tuple(Term(x, w[columns].to(x.dtype)) for x, w in self.terms)
        bias = None if self.bias is None else self.bias[columns]
        return replace(self, terms=terms, bias=bias, kept=None if self.kept is None else self.kept[:, columns])


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums are kept: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Statistics(NamedTuple):
    """Of the logits x of each row: m = max, sum of exp(x - m), sum of (x - m) exp(x - m), and the target's x.

    All [T], or [S, T] of S parts of the vocabulary. m is finite even where x is all -inf, so that no difference is NaN;
    the target's logit is -inf in every part that does not hold it.
    """

    max: torch.Tensor
    sum: torch.Tensor
    dot: torch.Tensor
    target: torch.Tensor

    def relative_to(self, maximum: torch.Tensor) -> Statistics:
        """The same for another m, at least as large."""
        shift = self.max - maximum
        scale = shift.exp()
        return Statistics(maximum, scale * self.sum, scale * (self.dot + shift * self.sum), self.target)

    def merged(self) -> Statistics:
        """[T] of the whole from [S, T] of its parts."""
        _, total, dot, target = self.relative_to(self.max.amax(0))
        return Statistics(self.max.amax(0), total.sum(0), dot.sum(0), target.amax(0))

    def outputs(self, with_entropy: bool) -> LinearLogprob:
        """log-prob = x - m - log sum; log-sum-exp = m + log sum; entropy = log sum - dot / sum."""
        log_sum = self.sum.log()
        entropy = log_sum - self.dot / self.sum if with_entropy else None
        return LinearLogprob(self.target - self.max - log_sum, self.max + log_sum, entropy)


@dataclass(frozen=True, slots=True)
class Upstream:
    """What a row's logits x get as gradient: onehot(target) * of_target + p * (of_softmax - of_entropy * log p).

    With upstream gradients a, b, c of log-prob, log-sum-exp and entropy h, and p = softmax(x): d log-prob = onehot - p,
    d log-sum-exp = p, d h = -p (log p + h); hence of_target = a, of_softmax = b - a - c h, of_entropy = c. All [T];
    `of_entropy` is None where nothing comes back through the entropy. log p = x - logsumexp. Targets count from the
    first vocabulary entry at hand; those outside belong to another part.
    """

    targets: torch.Tensor
    logsumexp: torch.Tensor
    of_target: torch.Tensor
    of_softmax: torch.Tensor
    of_entropy: torch.Tensor | None

    def rows(self, rows: slice | torch.Tensor) -> Upstream:
        of_entropy = None if self.of_entropy is None else self.of_entropy[rows]
        return Upstream(
            self.targets[rows], self.logsumexp[rows], self.of_target[rows], self.of_softmax[rows], of_entropy
        )

    def columns(self, columns: slice) -> Upstream:
        return Upstream(self.targets - columns.start, self.logsumexp, self.of_target, self.of_softmax, self.of_entropy)

    def nonzero_rows(self) -> torch.Tensor:
        """Indices [R] of the rows through which anything comes back."""
        nonzero = (self.of_target != 0) | (self.of_softmax != 0)
        if self.of_entropy is not None:
            nonzero |= self.of_entropy != 0
        return nonzero.nonzero()[:, 0]
