"""What may be added to the loss of a token beside its advantage: an entropy bonus and the KL to a
reference policy.

With d = log pi_ref - log pi at a sampled token, the KL estimators are k1 = -d, k2 = d^2 / 2, k3 =
exp(d) - 1 - d. Where the KL enters decides what is optimised (on policy; s: the tokens before):

- reward: each token's advantage loses beta times the sum of k over it and the tokens after it. With
  k1 the update is -beta grad KL(pi || pi_ref) of whole responses, exactly; k2 and k3 leave out what
  their own gradient would add.
- loss: beta k is added to the token's loss. k2 gives the gradient of KL(pi(. | s) || pi_ref(. | s))
  at the states that were sampled, k3 that of the reverse, KL(pi_ref(. | s) || pi(. | s)); k1's has
  mean 0, so the configuration refuses it. What a token does to the states that follow is left out.

The entropy bonus gives the gradient of H(pi(. | s)) at the states that were sampled. All are under
the token's weight w_c / D, as its loss is, and reach every trace of a component that is trained,
those without credit too. A component's goal with scale s thus weighs beta T / s against its reward,
T the traces of a problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spiral_mega.algorithm.losses import MAX_LOG_RATIO
from spiral_mega.config.schema import AlgorithmConfig, KlConfig

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """k1, k2 or k3 [T] of the log-probs [T] that policy and reference give the sampled tokens."""
    d = reference_logprobs - logprobs
    if estimator == "k1":
        return -d
    return d * d / 2 if estimator == "k2" else d.clamp(max=MAX_LOG_RATIO).exp() - 1 - d


def sum_to_end(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """At each token the sum [T] of `values` over it and the rest of its sequence; sequences stand in order of id."""
    exact = values.double()
    totals = torch.zeros_like(exact).index_add(0, sequence_ids, exact)
    before = totals.cumsum(0) - totals  # of all sequences before each
    return (totals[sequence_ids] - (exact.cumsum(0) - exact - before[sequence_ids])).to(
        values.dtype
    )


@dataclass(frozen=True, slots=True)
class Regularizers:
    """The terms of a configuration; with all of them off, they change nothing."""

    entropy_bonus: float
    kl: KlConfig | None

    @classmethod
    def from_algorithm(cls, algorithm: AlgorithmConfig) -> Regularizers:
        return cls(algorithm.entropy_bonus, algorithm.kl)

    @property
    def active(self) -> bool:
        """Whether traces without credit are trained on as well."""
        return self.entropy_bonus != 0 or self.kl is not None

    def advantages(
        self,
        advantages: Tensor,
        logprobs: Tensor,
        reference_logprobs: Tensor | None,
        sequence_ids: Tensor,
    ) -> Tensor:
        """The advantages [T], less the KL where it is a reward."""
        if self.kl is None or reference_logprobs is None or self.kl.apply != "reward":
            return advantages
        k = kl_estimate(logprobs.detach(), reference_logprobs, self.kl.estimator)
        return advantages - self.kl.coefficient * sum_to_end(k, sequence_ids)

    def penalty(
        self, logprobs: Tensor, entropy: Tensor, reference_logprobs: Tensor | None
    ) -> Tensor | None:
        """What is added to the tokens' losses [T], or None."""
        terms = []
        if self.entropy_bonus:
            terms.append(-self.entropy_bonus * entropy)
        if self.kl is not None and reference_logprobs is not None and self.kl.apply == "loss":
            terms.append(
                self.kl.coefficient * kl_estimate(logprobs, reference_logprobs, self.kl.estimator)
            )
        return sum(terms[1:], terms[0]) if terms else None
