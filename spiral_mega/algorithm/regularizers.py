"""Regularizers of a token's loss: an entropy bonus, and the KL divergence to a reference policy.

With d = log pi_ref - log pi at a sampled token, the KL estimators are

    k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d

`algorithm.kl.apply` decides what is optimized (on policy; s: the preceding tokens):

- `reward`: a token's advantage is reduced by beta times the sum of k over it and the tokens after
  it. With k1 the update is exactly -beta grad KL(pi || pi_ref) of whole responses; k2 and k3 leave
  out what their own gradient would add.
- `loss`: beta k is added to the token's loss. k2 gives the gradient of KL(pi(. | s) || pi_ref(. |
  s)) at the sampled states, k3 that of the reverse, KL(pi_ref(. | s) || pi(. | s)). The gradient of
  k1 has mean 0, so the configuration refuses it. The effect of a token on later states is ignored.

The entropy bonus gives the gradient of H(pi(. | s)) at the sampled states. All terms are multiplied
by the token's weight w_c / D, as its loss is, and apply to every trace of a trained component, also
to those without credit. Against the reward of a component with scale s, the KL of a problem with T
traces thus counts beta T / s.

Suffix _R: one value for each of the R response tokens of a micro-batch.
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
    """Return k1, k2 or k3 [R] of the log-probs [R] of the sampled tokens under policy and reference."""
    d = reference_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d * d / 2
    return d.clamp(max=MAX_LOG_RATIO).exp() - 1 - d


def sum_to_end(values_R: Tensor, sequence_ids_R: Tensor) -> Tensor:
    """Return at each token the sum [R] of `values_R` over it and the rest of its sequence.

    Sequences are contiguous and in ascending order of id.
    """
    exact_R = values_R.double()
    total_R = torch.zeros_like(exact_R).index_add(0, sequence_ids_R, exact_R)  # by sequence id
    preceding_R = total_R.cumsum(0) - total_R  # sum over all sequences before each
    before_token_R = exact_R.cumsum(0) - exact_R - preceding_R[sequence_ids_R]
    return (total_R[sequence_ids_R] - before_token_R).to(values_R.dtype)


@dataclass(frozen=True, slots=True)
class Regularizers:
    """The regularizers of a configuration. With all of them off, they change nothing."""

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
        advantages_R: Tensor,
        logprobs_R: Tensor,
        reference_logprobs_R: Tensor | None,
        sequence_ids_R: Tensor,
    ) -> Tensor:
        """Return the advantages [R], minus the KL where it applies as a reward."""
        if self.kl is None or reference_logprobs_R is None or self.kl.apply != "reward":
            return advantages_R
        kl_R = kl_estimate(logprobs_R.detach(), reference_logprobs_R, self.kl.estimator)
        return advantages_R - self.kl.coefficient * sum_to_end(kl_R, sequence_ids_R)

    def penalty(
        self, logprobs_R: Tensor, entropy_R: Tensor, reference_logprobs_R: Tensor | None
    ) -> Tensor | None:
        """Return what is added to the tokens' losses [R], or None."""
        terms = []
        if self.entropy_bonus:
            terms.append(-self.entropy_bonus * entropy_R)
        if self.kl is not None and reference_logprobs_R is not None and self.kl.apply == "loss":
            kl_R = kl_estimate(logprobs_R, reference_logprobs_R, self.kl.estimator)
            terms.append(self.kl.coefficient * kl_R)
        return sum(terms[1:], terms[0]) if terms else None
