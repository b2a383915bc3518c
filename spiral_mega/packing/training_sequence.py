"""The trainer's view of a trace: tokens, sampler log-probs, one advantage, one weight. It knows no recipe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A prompt and the response [L] to learn from.

    Its loss is the sum of `weight` times the token loss at `advantage` over the response tokens, but for the `observation_spans`
    ranges [start, stop), which the model did not write. `weight` holds the component's weight and its denominator over
    the global batch, so sums of losses need no further scaling.
    """

    key: tuple[int, int]
    prompt_ids: list[int]
    response_ids: list[int]
    sampler_logprobs: list[float]
    advantage: float
    weight: float
    observation_spans: tuple[tuple[int, int], ...] = ()

    def loss_mask(self) -> list[bool]:
        """Which response tokens [L] the model wrote."""
        mask = [True] * len(self.response_ids)
        for start, stop in self.observation_spans:
            mask[start:stop] = [False] * (stop - start)
        return mask

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)
