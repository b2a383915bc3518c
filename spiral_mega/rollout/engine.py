"""What a rollout engine is: requests go in at any time, finished samples come out as they finish.

Shaped after vLLM's own loop, so that an engine with continuous batching can start aggregation requests while
other search traces are still being written. One request asks for n samples of one prompt, which an engine
with a prefix cache serves from one prefill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spiral_mega.distributed.runtime import Runtime
from spiral_mega.traces import SEARCH, FinishReason


@dataclass(frozen=True, slots=True)
class Request:
    """n samples of one prompt. Sample i is drawn with seed `seed + i`, whatever else the engine is doing.

    `key` is the caller's, unique among the requests in flight, and comes back with each sample. Where not all fit,
    those of lower `priority` go first. `component` tells who is asked, where there are two models.
    """

    key: tuple[Any, ...]
    prompt_ids: list[int]
    num_samples: int
    seed: int
    max_tokens: int
    priority: int = 0
    component: str = SEARCH


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished response: its tokens [L], end token included, and their log-probs [L] under the temperature.

    `cached_tokens` of its prompt were not computed for it, because the engine had them.
    """

    key: tuple[Any, ...]
    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Replica:
    """The ranks that hold one engine between them (tensor parallel), this rank among them; alone by default.

    They are given the same requests and sample the same; the leader, the first of them, keeps what was sampled. `index`
    tells the replicas apart, of which there are `count`, each of `size` neighbouring ranks.
    """

    index: int = 0
    count: int = 1
    leader: bool = True
    size: int = 1

    def ranks(self, index: int) -> range:
        """The ranks of replica `index`."""
        return range(index * self.size, (index + 1) * self.size)


def make_replica(runtime: Runtime, ranks: int) -> Replica:
    """This rank's replica when every `ranks` neighbours share an engine. `ranks` divides the world."""
    index, place = divmod(runtime.rank, ranks)
    return Replica(index, runtime.world_size // ranks, place == 0, ranks)


class Sampler(Protocol):
    """Answers requests. Temperature and stop tokens are set when it is built."""

    replica: Replica

    def add(self, request: Request) -> None:
        """Queue a request; allowed at any time, also between calls of `step`."""

    def step(self) -> list[Sample]:
        """Advance a little, and return the samples that have finished since the last call (possibly none).

        A caller decides between steps whether to give up, so a step takes about a token's time.
        """

    def has_unfinished(self) -> bool:
        """Whether some request still lacks a sample."""

    def abort(self, keys: Collection[tuple[Any, ...]]) -> None:
        """Give up what is unfinished of the requests of these keys; none of it comes out any more."""

    def reset_prefix_cache(self) -> None:
        """Drop cached prompts, so that nothing sampled before touches what comes. Nothing may be in flight."""

    def sleep(self) -> None:
        """Leave the device to others until the next load. Nothing may be in flight."""

    def close(self) -> None:
        """Give back what the engine holds; nothing may be asked of it, or of the process group, afterwards."""


class RolloutEngine(Sampler, Protocol):
    """Samples from the current weights of one policy."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the policy's full tensors by their Hugging Face names, `lm_head.weight` always among them.

        Every rank of the replica gives them. Raises ValueError if a tensor is unknown, missing or of another shape; the
        engine then refuses to sample until a load succeeds.
        """

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take adapters of the weights loaded before, as `model.lora` describes them and by PEFT's names; use them."""
