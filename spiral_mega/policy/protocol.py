"""The protocol of a policy: what the training loop and the weight sync call, whatever shards the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from spiral_mega.packing.training_sequence import TrainingSequence


class FrozenPolicy(Protocol):
    """A model that computes log-probs and streams its weights."""

    def logprobs(self, sequences: list[TrainingSequence]) -> torch.Tensor:
        """Compute log-probs [R] of the response tokens of this rank's sequences, in order;
        collective.

        At the sampling temperature, without gradient, in token trees of at most
        `policy.microbatch_tokens`. Keys are unique.
        """

    def weights(
        self, dtype: torch.dtype | None = None, *, merge: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors by Hugging Face name, in `dtype` (default: their own); collective.

        Adapters are merged, or left out without `merge`.
        """

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapters' whole factors by the names of PEFT's files; collective."""

    def save_pretrained(self, folder: Path) -> None:
        """Write the merged weights in Hugging Face format, or an adapter on a shared base in PEFT's; collective."""


class Policy(FrozenPolicy, Protocol):
    """A model that is trained on weighted sequences."""

    replica: (
        int  # index of the copy of the model that this rank is part of; its ranks share the index
    )

    def update(self, microbatches: list[list[TrainingSequence]]) -> dict[str, float]:
        """Take one optimizer step on this replica's micro-batches, of which each replica has as
        many; collective.

        Returns metrics, equal on all ranks.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return sharded model, optimizer and schedule, for torch.distributed.checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
