"""The trainer's view of a trace: tokens, sampler log-probs, one advantage, one weight. It knows no recipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class SequenceKey(NamedTuple):
    """Identifies a sequence in a step: the index of its episode's prompt, and its position among
    the episode's traces.

    Sequences of one `prompt_index` are merged into one token tree.
    """

    prompt_index: int
    position: int


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A prompt, and the response [L] to learn from.

    Its loss is the sum of `weight` times the token loss at `advantage` over the response tokens,
    without those in `observation_spans`, ranges [start, stop) that the model did not write.
    `weight` holds the component's weight and its denominator over the global batch, so sums of
    losses need no further scaling.
    """

    key: SequenceKey
    prompt_ids: list[int]
    response_ids: list[int]
    sampler_logprobs: list[float]
    advantage: float
    weight: float
    observation_spans: tuple[tuple[int, int], ...] = ()

    def loss_mask(self) -> list[bool]:
        """Return which response tokens [L] the model wrote."""
        mask = [True] * len(self.response_ids)
        for start, stop in self.observation_spans:
            mask[start:stop] = [False] * (stop - start)
        return mask

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def group_by_prompt(sequences: Iterable[TrainingSequence]) -> list[list[TrainingSequence]]:
    """Group the sequences of each prompt index, in order of first appearance."""
    groups = defaultdict(list)
    for sequence in sequences:
        groups[sequence.key.prompt_index].append(sequence)
    return list(groups.values())
