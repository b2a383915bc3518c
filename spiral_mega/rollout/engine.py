"""The engine protocol: add requests at any time, get samples as they finish.

It has the shape of vLLM's own loop, so that an engine with continuous batching starts aggregation
requests while other search traces are still decoding. One request asks for n samples of one prompt,
which an engine with a prefix cache serves from one prefill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from spiral_mega.distributed.runtime import Runtime
from spiral_mega.traces import FinishReason


class RequestKey(NamedTuple):
    """Names what a request samples: answers to an episode's set, or to its problem.

    The first turn of all answers is one request, without `trace`. Each later turn, `turn` >= 1, is
    a request for the answer with the index `trace` alone. `component` selects the model that
    answers, of two.
    """

    episode: int
    component: str
    set_index: int | None = None
    trace: int | None = None
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """`num_samples` samples of one prompt; sample i is drawn with seed `seed + i` alone.

    `key` is unique among the requests in flight and is returned with each sample. Requests of lower
    `priority` are admitted first.
    """

    key: RequestKey
    prompt_ids: list[int]
    num_samples: int
    seed: int
    max_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished response: its tokens [L], end token included, and their log-probs [L].

    Log-probs are under the engine's temperature.

    `cached_tokens` tokens of its prompt came from the engine's cache.
    """

    key: RequestKey
    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    cached_tokens: int = 0

    @property
    def trace_key(self) -> RequestKey:
        """The same for all turns of a trace."""
        trace = self.index if self.key.trace is None else self.key.trace
        return self.key._replace(trace=trace, turn=0)


@dataclass(frozen=True, slots=True)
class Replica:
    """The ranks that hold one engine between them (tensor parallel); by default this rank alone.

    They are given the same requests and return the same samples; their first rank, the leader,
    keeps the episodes. There are `count` replicas of `size` consecutive ranks each, and this one is
    number `index`.
    """

    index: int = 0
    count: int = 1
    leader: bool = True
    size: int = 1

    def ranks(self, index: int) -> range:
        """Return the ranks of replica `index`."""
        return range(index * self.size, (index + 1) * self.size)

    def owner(self, episode: int) -> int:
        """Return the index of the replica that samples an episode's search and keeps the result."""
        return episode % self.count

    def owns(self, episode: int) -> bool:
        """Whether this replica owns an episode."""
        return self.owner(episode) == self.index


def make_replica(runtime: Runtime, ranks: int) -> Replica:
    """Return this rank's replica when every `ranks` consecutive ranks share an engine."""
    index, position = divmod(runtime.rank, ranks)
    return Replica(index, runtime.world_size // ranks, position == 0, ranks)


class Sampler(Protocol):
    """Samples responses to requests. Temperature and stop tokens are set at construction."""

    replica: Replica

    def add(self, request: Request) -> None:
        """Queue a request; allowed at any time between calls of `step`."""

    def step(self) -> list[Sample]:
        """Advance by about one token; return the samples that finished, possibly none.

        Callers decide between steps whether to stop, so a step has to be short.
        """

    def has_unfinished(self) -> bool:
        """Whether any request still lacks a sample."""

    def abort(self, keys: Collection[RequestKey]) -> None:
        """Drop the unfinished samples of these requests; none of them is returned later."""

    def reset_prefix_cache(self) -> None:
        """Drop cached prompts, so that earlier samples cannot affect later ones.

        Nothing may be in flight.
        """

    def sleep(self) -> None:
        """Free the device's memory until the next load of weights. Nothing may be in flight."""

    def close(self) -> None:
        """Release all resources; afterwards neither engine nor process group can be used."""


class RolloutEngine(Sampler, Protocol):
    """Samples from the current weights of one policy."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load full tensors by their Hugging Face names, always including `lm_head.weight`.

        Called on every rank of the replica. Raises ValueError if a tensor is unknown, missing or of
        another shape; the engine then refuses to sample until a load succeeds.
        """

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load adapters of the current weights, by PEFT's names, as `model.lora` describes them."""
