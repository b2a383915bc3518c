"""The policy on megatron-core: forward and backward by its schedules, one step of its distributed optimizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
from spiral_mega.packing.balance import split_into_microbatches
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree_batch import TreeBatch, pack
from spiral_mega.policy.kl_reference import reference_path
from spiral_mega.policy.loss import Totals, weighted_loss
from spiral_mega.policy.megatron.context_parallel import Share, keys_of_a_head, pad_rows, share_out
from spiral_mega.policy.megatron.megatron_lora import adapters_off
from spiral_mega.policy.megatron.megatron_model import build_model
from spiral_mega.policy.megatron.megatron_optimizer import DistributedAdamW, wrap
from spiral_mega.policy.megatron.parallel_layout import start_layout

log = logging.getLogger(__name__)


class MegatronPolicy:
    """See spiral_mega.policy.protocol.Policy. Log-probs are taken at the temperature that the sampler used."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self.config, self.device = config, runtime.device
        hf_config = read_model_config(config.model.path)
        self.layout = start_layout(config.policy.megatron, config.run.seed)
        self.replica = self.layout.replica
        self.head_keys = keys_of_a_head(hf_config)
        self.shards = build_model(config, config.model, hf_config, self.layout, runtime)
        self.stages, self.megatron_config = wrap(self.shards.stages), self.shards.stages[0].config
        # Weights of the sequences hold the global denominators, so gradients are sums: no count to divide them by.
        self.megatron_config.finalize_model_grads_func = _finalize
        self.loss_fn, self.regularizers = make_loss(config.algorithm), Regularizers.of(config.algorithm)
        self.reference = self._make_reference(runtime)
        self.microbatch_tokens = config.policy.microbatch_tokens
        updates = config.run.steps * config.batch.minibatches
        self.optimizer = DistributedAdamW(self.stages, config.optimizer, updates)

    def update(self, microbatches: list[list[TrainingSequence]]) -> dict[str, float]:
        totals = Totals()
        for stage in self.stages:
            stage.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        of_reference = iter(self._reference_logprobs(microbatches) if self.reference is not None else [])
        self._run(microbatches, partial(self._loss, totals, of_reference), forward_only=False)
        norm, lr = self.optimizer.norm(), self.optimizer.lr
        skipped = not math.isfinite(norm)
        if skipped:
            log.warning("the gradient's norm is %s: this update is skipped", norm)
        else:
            self.optimizer.step(norm)
        self.optimizer.updates += 1
        return {
            **(totals if self.layout.speaks else Totals()).reduce(),
            "optim/grad_norm": norm,
            "optim/lr": lr,
            "optim/skipped": float(skipped),
            "optim/microbatches": float(len(microbatches)),
        }

    @torch.no_grad()
    def logprobs(self, sequences: list[TrainingSequence]) -> torch.Tensor:
        # The ranks of a replica compute one batch together: that of the sequences of all.
        every: list[list[TrainingSequence]] = [[] for _ in range(dist.get_world_size(self.layout.replica_group))]
        dist.all_gather_object(every, sequences, group=self.layout.replica_group)
        parts = [
            (rank, part)
            for rank, each in enumerate(every)
            for part in split_into_microbatches(each, self.microbatch_tokens)
        ]
        rounds = int(max_over_ranks({"rounds": len(parts)})["rounds"])
        batches = [part for _, part in parts] + [[]] * (rounds - len(parts))
        found = self._logprobs(batches, self.stages)
        mine = dist.get_rank(self.layout.replica_group)
        by_key: dict[SequenceKey, torch.Tensor] = {}
        for (rank, part), logprobs in zip(parts, self._spoken(parts, found), strict=True):
            if rank == mine:
                lengths = [sum(s.loss_mask()) for s in part]
                by_key |= zip([s.key for s in part], torch.split(logprobs, lengths), strict=True)
        return torch.cat([by_key[s.key] for s in sequences] or [torch.empty(0, device=self.device)])

    def _logprobs(self, microbatches: list[list[TrainingSequence]], stages: list[Any]) -> list[torch.Tensor]:
        """Of the response tokens of each micro-batch [R], on the last stage; nothing on others."""
        found: list[torch.Tensor] = []

        def keep(batch: TreeBatch, output: LinearLogprob) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            found.append(output.logprob[batch.gather_indices])
            return found[-1].sum(), torch.tensor(0, dtype=torch.int), {}

        if microbatches:
            self._run(microbatches, keep, forward_only=True, stages=stages)
        return found

    def _spoken(self, parts: list[tuple[int, list[TrainingSequence]]], found: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the last stage found for each of `parts`, on every rank of the replica."""
        counts = [sum(sum(s.loss_mask()) for s in part) for _, part in parts]
        flat = torch.zeros(sum(counts), device=self.device)
        if self.layout.speaks and parts:
            flat.copy_(torch.cat(found)[: len(flat)])
        dist.all_reduce(flat, group=self.layout.replica_group)
        return list(torch.split(flat, counts)) if parts else []

    def weights(self, dtype: torch.dtype | None = None, *, merge: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        adapters = self.shards.adapters if merge else None
        dtype = dtype or self.megatron_config.params_dtype
        return self.shards.weights.stream(
            torch.Tensor.detach, dtype, self._bucket_bytes(), None if adapters is None else adapters.merge
        )

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.shards.trained.stream(torch.Tensor.detach, torch.float32, self._bucket_bytes())

    def _bucket_bytes(self) -> int:
        return int(self.config.rollout.sync.bucket_mb * 2**20)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict(self.shards.trained)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def save_pretrained(self, folder: Path) -> None:
        save_pretrained(self.weights(), self.config.model, folder)

    def _pack(self, sequences: list[TrainingSequence]) -> tuple[TreeBatch, Share]:
        """A micro-batch whole, for the loss, and what this rank computes of it."""
        cut = self.layout.tensor_size if self.megatron_config.sequence_parallel else 1
        batch = pad_rows(pack(sequences), cut * self.layout.context_size)
        share = share_out(batch, self.layout.context_group, self.head_keys)
        return batch.to(self.device), share.to(self.device)

    def _make_reference(self, runtime: Runtime) -> list[Any] | None:
        """The stages that algorithm.kl is measured to: with adapters the policy's own, else of a model cut as it is."""
        if self.config.algorithm.kl is None:
            return None
        if (path := reference_path(self.config)) is None:
            return self.stages
        other = build_model(self.config, ModelConfig(path=path), read_model_config(path), self.layout, runtime)
        return [stage.requires_grad_(False).eval() for stage in other.stages]

    @torch.no_grad()
    def _reference_logprobs(self, microbatches: list[list[TrainingSequence]]) -> list[torch.Tensor]:
        assert self.reference is not None
        with adapters_off(self.reference):
            return self._logprobs(microbatches, self.reference)

    def _run(
        self,
        microbatches: list[list[TrainingSequence]],
        of_output: Any,
        *,
        forward_only: bool,
        stages: list[Any] | None = None,
    ) -> None:
        """Through the schedule: forward, and unless `forward_only` backward; `of_output(batch, output)` on the last
        stage gives the loss. Stages in turns take as many micro-batches as there are ranks; empty ones are added."""
        rounds = self.megatron_config.pipeline_model_parallel_size if len(self.stages) > 1 else 1
        batches = [self._pack(each) for each in [*microbatches, *[[]] * (-len(microbatches) % rounds)]]

        def step(data: Iterator[tuple[TreeBatch, Share]], model: Any) -> tuple[Any, Any]:
            batch, share = next(data)
            return model(share, self.config.rollout.sampling.temperature), partial(of_output, batch)

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in self.stages],
            model=stages or self.stages,
            num_microbatches=len(batches),
            seq_length=1,  # unused: stages tell each other the shapes (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _loss(
        self, totals: Totals, of_reference: Iterator[torch.Tensor], batch: TreeBatch, output: LinearLogprob
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """The micro-batch's loss, and as megatron-core wants them a count of tokens, which nothing uses, and no report.

        Sequences that share a token read one log-prob, whose gradient is the sum of theirs.
        """
        assert output.entropy is not None
        logprobs, entropy = output.logprob[batch.gather_indices], output.entropy[batch.gather_indices]
        reference = next(of_reference, None)  # stages take the batches in order
        loss = weighted_loss(logprobs, entropy, batch, self.loss_fn, totals, self.regularizers, reference)
        return loss, torch.tensor(0, dtype=torch.int), {}


def _finalize(chunks: list[Any], _tokens: torch.Tensor, **groups: Any) -> None:
    finalize_model_grads(chunks, None, **groups)
