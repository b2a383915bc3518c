"""The trainer's view of a trace: tokens, sampler log-probs, one advantage, one weight. It knows no recipe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt and the response [L] to learn from.

    Its loss is the sum over response tokens of `weight` times the token loss at `advantage`. `weight` holds the
    component's weight and its denominator over the global batch, so sums of losses need no further scaling.
    """

    key: tuple[int, int]
    prompt_ids: list[int]
    response_ids: list[int]
    sampler_logprobs: list[float]
    advantage: float
    weight: float

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)
