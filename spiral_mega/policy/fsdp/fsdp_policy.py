"""The FSDP2 policy: forward on packed token trees, weighted sums of token losses, one optimizer step."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from spiral_mega.algorithm.losses import make_loss
from spiral_mega.algorithm.regularizers import Regularizers
from spiral_mega.config import Config
from spiral_mega.distributed.collectives import max_over_ranks
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.models.export import save_adapter, save_pretrained
from spiral_mega.packing.microbatches import split_into_microbatches
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree_batch import TreeBatch, pack
from spiral_mega.policy.fsdp.fsdp_weights import adapter_weights, full_weights
from spiral_mega.policy.fsdp.reference_model import ReferenceModel, build_reference
from spiral_mega.policy.fsdp.sharded_model import build_model
from spiral_mega.policy.lora import DEFAULT_ADAPTER, is_adapter_parameter, set_active_adapter
from spiral_mega.policy.loss import Totals, weighted_loss
from spiral_mega.policy.lr_schedule import make_lr_schedule
from spiral_mega.policy.optimizer import make_optimizer, move_moments
from spiral_mega.process.heartbeat import heartbeat

log = logging.getLogger(__name__)


class FsdpModel:
    """See spiral_mega.policy.protocol.FrozenPolicy. Log-probs are taken at the sampling
    temperature.

    With a `shared` model it is the adapter of that name on it, alongside others'; otherwise it
    builds its own model.
    """

    def __init__(
        self, config: Config, runtime: Runtime, shared: Any = None, adapter: str = DEFAULT_ADAPTER
    ) -> None:
        self.config, self.device = config, runtime.device
        self.gatherer = runtime.row_gatherer()
        self.is_shared = shared is not None
        self.model = (
            shared
            if self.is_shared
            else build_model(config.model, config.policy, runtime, config.run.seed)
        )
        self.adapter_name = adapter

    def parameters(self) -> list[nn.Parameter]:
        """Return its own parameters: with adapters, those of its adapter."""
        return [parameter for name, parameter in self.model.named_parameters() if self._owns(name)]

    def freeze(self) -> Self:
        """Exclude its parameters from training."""
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        return self

    @torch.no_grad()
    def logprobs(self, sequences: list[TrainingSequence]) -> torch.Tensor:
        microbatches = split_into_microbatches(sequences, self.config.policy.microbatch_tokens)
        rounds = int(max_over_ranks({"rounds": len(microbatches)})["rounds"])
        microbatches += [
            [] for _ in range(rounds - len(microbatches))
        ]  # every rank joins every forward
        by_key: dict[SequenceKey, torch.Tensor] = {}
        for microbatch in microbatches:
            logprobs_R, _ = self._forward(pack(microbatch).to(self.device))
            lengths = [sum(sequence.loss_mask()) for sequence in microbatch]
            if microbatch:
                keys = [sequence.key for sequence in microbatch]
                by_key |= zip(keys, torch.split(logprobs_R, lengths), strict=True)
        self.model.reshard()  # or FSDP keeps the root unsharded, in compute dtype, until the next backward
        return torch.cat(
            [by_key[sequence.key] for sequence in sequences] or [torch.empty(0, device=self.device)]
        )

    def weights(
        self, dtype: torch.dtype | None = None, *, merge: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        adapter = self.adapter_name if merge else None
        return full_weights(
            self.model,
            self.gatherer,
            bucket_bytes=self._bucket_bytes(),
            dtype=dtype,
            adapter=adapter,
        )

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        return adapter_weights(
            self.model, self.gatherer, bucket_bytes=self._bucket_bytes(), adapter=self.adapter_name
        )

    def save_pretrained(self, folder: Path) -> None:
        if self.is_shared:
            save_adapter(self.adapter(), self.config.model, folder)
        else:
            save_pretrained(self.weights(), self.config.model, folder)

    def _owns(self, parameter: str) -> bool:
        return self.config.model.lora is None or is_adapter_parameter(parameter, self.adapter_name)

    def _bucket_bytes(self) -> int:
        return int(self.config.rollout.sync.bucket_mb * 2**20)

    def _forward(self, batch: TreeBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probs [R] of the response tokens, and entropies [R] where they are predicted.

        Sequences that share a token read one log-prob, whose gradient is the sum of theirs.
        """
        heartbeat()
        set_active_adapter(self.model, self.adapter_name)
        logprobs_U, entropy_U = self.model.logprobs(batch, self.config.rollout.sampling.temperature)
        return logprobs_U[batch.gather_indices], entropy_U[batch.gather_indices]


class FsdpPolicy(FsdpModel):
    """See spiral_mega.policy.protocol.Policy."""

    def __init__(
        self, config: Config, runtime: Runtime, shared: Any = None, adapter: str = DEFAULT_ADAPTER
    ) -> None:
        super().__init__(config, runtime, shared, adapter)
        self.replica = runtime.rank
        self.loss_fn, self.regularizers = (
            make_loss(config.algorithm),
            Regularizers.from_algorithm(config.algorithm),
        )
        self.reference: ReferenceModel | None = build_reference(self.model, config, runtime)
        self.optimizer = make_optimizer(self.parameters(), config.optimizer)
        if config.optimizer.offload:
            move_moments(self.optimizer, torch.device("cpu"))
        total_updates = config.run.steps * config.batch.minibatches
        self.schedule = make_lr_schedule(self.optimizer, config.optimizer, total_updates)

    def update(self, microbatches: list[list[TrainingSequence]]) -> dict[str, float]:
        totals = Totals()
        for microbatch in microbatches:
            self._accumulate_gradient(pack(microbatch).to(self.device), totals)
        norm = self._clip_gradient()
        skipped = not math.isfinite(norm)
        if skipped:
            log.warning("the gradient's norm is %s: this update is skipped", norm)
        else:
            self._step()
        self.optimizer.zero_grad(set_to_none=True)
        lr = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        return {
            **totals.reduce(),
            "optim/grad_norm": norm,
            "optim/lr": lr,
            "optim/skipped": float(skipped),
            "optim/microbatches": float(len(microbatches)),
        }

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self._state_options())
        # With adapters the base is in the model's files; without this filter a tied head would be
        # saved, and so would the adapters of other models on a shared base.
        model = {name: tensor for name, tensor in model.items() if self._owns(name)}
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self._state_options(),
        )
        self.schedule.load_state_dict(state["schedule"])

    def _state_options(self) -> StateDictOptions:
        lora = self.config.model.lora is not None
        return StateDictOptions(ignore_frozen_params=lora, strict=not lora)

    def _accumulate_gradient(self, batch: TreeBatch, totals: Totals) -> None:
        """Add the gradient of one micro-batch: see `weighted_loss`."""
        reference = (
            self.reference.logprobs(batch)[batch.gather_indices]
            if self.reference is not None
            else None
        )
        logprobs, entropy = self._forward(batch)
        loss = weighted_loss(
            logprobs, entropy, batch, self.loss_fn, totals, self.regularizers, reference
        )
        torch.autograd.backward(loss)

    def _clip_gradient(self) -> float:
        """Clip to max_grad_norm and return the norm before; not finite when some gradient is not."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, self.config.optimizer.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _step(self) -> None:
        if self.config.optimizer.offload:
            move_moments(self.optimizer, self.device)
        self.optimizer.step()
        if self.config.optimizer.offload:
            move_moments(self.optimizer, torch.device("cpu"))
