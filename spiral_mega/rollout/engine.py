"""What a rollout engine is: requests go in at any time, finished samples come out as they finish.

Shaped after vLLM's own loop, so that an engine with continuous batching can start aggregation requests while
other search traces are still being written. One request asks for n samples of one prompt, which an engine
with a prefix cache serves from one prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spiral_mega.traces import FinishReason


@dataclass(frozen=True, slots=True)
class Request:
    """n samples of one prompt. Sample i is drawn with seed `seed + i`, whatever else the engine is doing.

    `key` is the caller's, unique among the requests in flight, and comes back with each sample.
    """

    key: tuple[Any, ...]
    prompt_ids: list[int]
    num_samples: int
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished response: its tokens [L], end token included, and their log-probs [L] under the temperature."""

    key: tuple[Any, ...]
    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason


class RolloutEngine(Protocol):
    """Samples from the current policy. Temperature and stop tokens are set when the engine is built."""

    def add(self, request: Request) -> None:
        """Queue a request; allowed at any time, also between calls of `step`."""

    def step(self) -> list[Sample]:
        """Advance a little, and return the samples that have finished since the last call (possibly none).

        A caller decides between steps whether to give up, so a step takes about a token's time.
        """

    def has_unfinished(self) -> bool:
        """Whether some request still lacks a sample."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the policy's full tensors by their Hugging Face names, `lm_head.weight` always among them.

        Raises ValueError if a tensor is unknown, missing or of another shape; the engine then refuses to sample
        until a load succeeds.
        """
