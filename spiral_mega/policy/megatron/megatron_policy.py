"""The policy on megatron-core: forward and backward by its schedules, a step of its optimizer.

An update, on each rank:

    micro-batches of the replica --pack, pad--> TreeBatch --shard_context--> this rank's rows
        --stages, by get_forward_backward_func--> log-probs of the micro-batch, on the last stage
        --weighted_loss--> backward through the stages --> sum over replicas --> clip --> AdamW
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from spiral_mega.algorithm.losses import make_loss
from spiral_mega.algorithm.regularizers import Regularizers
from spiral_mega.config import Config, ModelConfig
from spiral_mega.distributed.collectives import max_over_ranks
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.kernels.logits import LinearLogprob
from spiral_mega.models.export import save_pretrained
from spiral_mega.models.model_config import read_model_config
from spiral_mega.packing.microbatches import split_into_microbatches
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree_batch import TreeBatch, pack
from spiral_mega.policy.loss import Totals, weighted_loss
from spiral_mega.policy.megatron.context_parallel import (
    ContextShard,
    head_cost_in_keys,
    pad_rows,
    shard_context,
)
from spiral_mega.policy.megatron.megatron_lora import adapters_off
from spiral_mega.policy.megatron.megatron_model import build_model
from spiral_mega.policy.megatron.megatron_optimizer import DistributedAdamW, wrap_ddp
from spiral_mega.policy.megatron.parallel_layout import init_layout
from spiral_mega.policy.reference_path import reference_path

log = logging.getLogger(__name__)

# What megatron-core's schedule expects of a loss function: the loss, a count of tokens, and a
# report. Neither of the last two is used.
ScheduleLoss = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
LossFunc = Callable[[TreeBatch, LinearLogprob], ScheduleLoss]


class _OwnedPart(NamedTuple):
    """Sequences of one micro-batch, and the rank within the replica that asked for their log-probs."""

    owner: int
    sequences: list[TrainingSequence]


class MegatronPolicy:
    """Implements spiral_mega.policy.protocol.Policy.

    Log-probs are taken at the sampling temperature.
    """

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self.config, self.device = config, runtime.device
        hf_config = read_model_config(config.model.path)
        self.layout = init_layout(config.policy.megatron, config.run.seed)
        self.replica = self.layout.replica
        self.head_keys = head_cost_in_keys(hf_config)
        self.model = build_model(config, config.model, hf_config, self.layout, runtime)
        self.stages, self.megatron_config = wrap_ddp(self.model.stages), self.model.stages[0].config
        # The sequences' weights include the global denominators, so gradients are sums: no count to
        # divide them by.
        self.megatron_config.finalize_model_grads_func = _finalize_gradients
        self.loss_fn, self.regularizers = (
            make_loss(config.algorithm),
            Regularizers.from_algorithm(config.algorithm),
        )
        self.reference = self._make_reference(runtime)
        self.microbatch_tokens = config.policy.microbatch_tokens
        updates = config.run.steps * config.batch.minibatches
        self.optimizer = DistributedAdamW(self.stages, config.optimizer, updates)

    def update(self, microbatches: list[list[TrainingSequence]]) -> dict[str, float]:
        totals = Totals()
        for stage in self.stages:
            stage.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        reference = iter(
            self._reference_logprobs(microbatches) if self.reference is not None else []
        )
        self._run_schedule(
            microbatches, partial(self._loss, totals, reference), self.stages, forward_only=False
        )
        norm, lr = self.optimizer.grad_norm(), self.optimizer.lr
        skipped = not math.isfinite(norm)
        if skipped:
            log.warning("the gradient's norm is %s: this update is skipped", norm)
        else:
            self.optimizer.step(norm)
        self.optimizer.updates += 1
        return {
            **(totals if self.layout.is_loss_rank else Totals()).reduce(),
            "optim/grad_norm": norm,
            "optim/lr": lr,
            "optim/skipped": float(skipped),
            "optim/microbatches": float(len(microbatches)),
        }

    @torch.no_grad()
    def logprobs(self, sequences: list[TrainingSequence]) -> torch.Tensor:
        parts = self._gather_parts(sequences)
        # Schedules of all replicas must run equally many micro-batches.
        rounds = int(max_over_ranks({"rounds": len(parts)})["rounds"])
        microbatches = [part.sequences for part in parts] + [[]] * (rounds - len(parts))
        last_stage_logprobs = self._forward_logprobs(microbatches, self.stages)
        own_rank = dist.get_rank(self.layout.replica_group)
        by_key: dict[SequenceKey, torch.Tensor] = {}
        for part, logprobs in zip(
            parts, self._share_logprobs(parts, last_stage_logprobs), strict=True
        ):
            if part.owner == own_rank:
                lengths = [sum(s.loss_mask()) for s in part.sequences]
                keys = [s.key for s in part.sequences]
                by_key |= zip(keys, torch.split(logprobs, lengths), strict=True)
        return torch.cat([by_key[s.key] for s in sequences] or [torch.empty(0, device=self.device)])

    def weights(
        self,
        dtype: torch.dtype | None = None,
        *,
        merge: bool = True,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        adapters = self.model.adapters
        transform = adapters.merge if merge and adapters is not None else None
        dtype = dtype or self.megatron_config.params_dtype
        return self.model.weights.stream(
            torch.Tensor.detach, dtype, self._bucket_bytes(), transform
        )

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.trained.stream(torch.Tensor.detach, torch.float32, self._bucket_bytes())

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict(self.model.trained)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def save_pretrained(self, folder: Path) -> None:
        save_pretrained(self.weights(), self.config.model, folder)

    def _bucket_bytes(self) -> int:
        return int(self.config.rollout.sync.bucket_mb * 2**20)

    def _gather_parts(self, sequences: list[TrainingSequence]) -> list[_OwnedPart]:
        """Split the sequences of all ranks of the replica, which compute them together, into micro-batches."""
        group = self.layout.replica_group
        gathered: list[list[TrainingSequence]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, sequences, group=group)
        parts = []
        for owner, owned in enumerate(gathered):
            microbatches = split_into_microbatches(owned, self.microbatch_tokens)
            parts += [_OwnedPart(owner, sequences) for sequences in microbatches]
        return parts

    def _forward_logprobs(
        self,
        microbatches: list[list[TrainingSequence]],
        stages: list[Any],
    ) -> list[torch.Tensor]:
        """Compute log-probs [R] of the response tokens of each micro-batch, on the last stage.

        [] on others.
        """
        logprobs: list[torch.Tensor] = []

        def collect(batch: TreeBatch, output: LinearLogprob) -> ScheduleLoss:
            logprobs.append(output.logprob[batch.gather_indices])
            return _schedule_loss(logprobs[-1].sum())

        if microbatches:
            self._run_schedule(microbatches, collect, stages, forward_only=True)
        return logprobs

    def _share_logprobs(
        self,
        parts: list[_OwnedPart],
        logprobs: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Send the last stage's log-probs of each part to every rank of the replica."""
        counts = []
        for part in parts:
            counts.append(sum(sum(sequence.loss_mask()) for sequence in part.sequences))
        flat = torch.zeros(sum(counts), device=self.device)
        if self.layout.is_loss_rank and parts:
            flat.copy_(torch.cat(logprobs)[: len(flat)])
        dist.all_reduce(flat, group=self.layout.replica_group)
        return list(torch.split(flat, counts)) if parts else []

    def _make_reference(self, runtime: Runtime) -> list[Any] | None:
        """Return the stages of the reference of algorithm.kl, or None without one.

        The reference is the policy with its adapters disabled, or a second model in the same
        layout.
        """
        if self.config.algorithm.kl is None:
            return None
        path = reference_path(self.config)
        if path is None:
            return self.stages
        other = build_model(
            self.config, ModelConfig(path=path), read_model_config(path), self.layout, runtime
        )
        return [stage.requires_grad_(False).eval() for stage in other.stages]

    @torch.no_grad()
    def _reference_logprobs(self, microbatches: list[list[TrainingSequence]]) -> list[torch.Tensor]:
        assert self.reference is not None
        with adapters_off(self.reference):
            return self._forward_logprobs(microbatches, self.reference)

    def _run_schedule(
        self,
        microbatches: Sequence[list[TrainingSequence]],
        loss_func: LossFunc,
        stages: list[Any],
        *,
        forward_only: bool,
    ) -> None:
        """Run forward and, unless `forward_only`, backward of all micro-batches.

        `loss_func` gets a micro-batch and its log-probs on the last stage. With virtual stages,
        pipeline_parallel must divide the number of micro-batches: empty ones are added.
        """
        multiple = self.megatron_config.pipeline_model_parallel_size if len(self.stages) > 1 else 1
        padding: list[list[TrainingSequence]] = [[]] * (-len(microbatches) % multiple)
        batches = [self._pack(sequences) for sequences in (*microbatches, *padding)]
        temperature = self.config.rollout.sampling.temperature

        def forward_step(
            data: Iterator[tuple[TreeBatch, ContextShard]],
            model: Any,
        ) -> tuple[Any, Any]:
            batch, shard = next(data)
            return model(shard, temperature), partial(loss_func, batch)

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.stages],
            model=stages,
            num_microbatches=len(batches),
            seq_length=1,  # unused: stages send each other the shapes (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _pack(self, sequences: list[TrainingSequence]) -> tuple[TreeBatch, ContextShard]:
        """Pack a micro-batch: whole, for the loss, and this rank's shard of it."""
        sequence_shards = self.layout.tensor_size if self.megatron_config.sequence_parallel else 1
        batch = pad_rows(pack(sequences), sequence_shards * self.layout.context_size)
        shard = shard_context(batch, self.layout.context_group, self.head_keys)
        return batch.to(self.device), shard.to(self.device)

    def _loss(
        self,
        totals: Totals,
        reference: Iterator[torch.Tensor],
        batch: TreeBatch,
        output: LinearLogprob,
    ) -> ScheduleLoss:
        """Compute the micro-batch's loss, and count it in `totals`.

        Sequences that share a token read the same log-prob, whose gradient is the sum of theirs.
        """
        assert output.entropy is not None
        logprobs, entropy = (
            output.logprob[batch.gather_indices],
            output.entropy[batch.gather_indices],
        )
        reference_logprobs = next(reference, None)  # stages take the micro-batches in order
        loss = weighted_loss(
            logprobs, entropy, batch, self.loss_fn, totals, self.regularizers, reference_logprobs
        )
        return _schedule_loss(loss)


def _schedule_loss(loss: torch.Tensor) -> ScheduleLoss:
    return loss, torch.tensor(0, dtype=torch.int), {}


def _finalize_gradients(chunks: list[Any], _tokens: torch.Tensor, **groups: Any) -> None:
    finalize_model_grads(chunks, None, **groups)
