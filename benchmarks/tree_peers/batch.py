"""The batch of every contender: 8 problems with 4 prompts of 700 tokens (a problem, and 4 of 8 traces in ascending
order), 4 responses of 128 tokens to each, for a Qwen3 of 3.2 M parameters in float32; clipped importance sampling, one
step of AdamW, entropies measured."""

from __future__ import annotations

import random
from typing import NamedTuple

VOCABULARY, PROBLEM, TRACE, RESPONSE = 3200, 60, 160, 128
BUDGET, CLIP, SAMPLER_LOGPROB, LEARNING_RATE = 16_384, 0.2, -8.0, 2e-5


class Item(NamedTuple):
    """A prompt, a response to it, and its advantage."""

    problem: int
    prompt: list[int]
    response: list[int]
    advantage: float


def batch(problems: int, response: int = RESPONSE) -> list[Item]:
    """Four prompts a problem, four responses a prompt, every other one right."""
    items = []
    for problem in range(problems):
        rng = random.Random(problem)
        text = lambda length: [rng.randrange(10, VOCABULARY) for _ in range(length)]  # noqa: B023, E731
        start, traces = text(PROBLEM), [text(TRACE) for _ in range(8)]
        for _ in range(4):
            shown = [token for i in sorted(rng.sample(range(8), 4)) for token in traces[i]]
            items += [
                Item(problem, [*start, *shown], text(response), 0.5 - i % 2) for i in range(4)
            ]
    return items
