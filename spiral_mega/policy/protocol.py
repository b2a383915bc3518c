"""What the loop asks of a policy, whatever shards it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from spiral_mega.packing.training_sequence import TrainingSequence


class FrozenPolicy(Protocol):
    """A model that tells log-probs and gives away its weights."""

    def logprobs(self, sequences: list[TrainingSequence]) -> torch.Tensor:
        """Log-probs [R] of the response tokens of this rank's sequences, in order, at the temperature; collective.

        Without gradient, through token trees of at most `policy.microbatch_tokens`. Keys are unique.
        """

    def weights(self, dtype: torch.dtype | None = None, *, merge: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by Hugging Face name, one at a time, in `dtype` or their own; collective.

        Adapters are merged, or else left out.
        """

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapters' whole factors by the names of PEFT's files; collective."""

    def save_pretrained(self, folder: Path) -> None:
        """Write the merged weights in Hugging Face form, or an adapter on a shared base in PEFT's; collective."""


class Policy(FrozenPolicy, Protocol):
    """One that is trained on weighted sequences."""

    replica: int  # the ranks that hold one copy of the model between them have the same number, from 0

    def update(self, microbatches: list[list[TrainingSequence]]) -> dict[str, float]:
        """One optimizer step on this replica's micro-batches (every one has as many). Metrics, equal on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Sharded model, optimizer and schedule, for torch.distributed.checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
