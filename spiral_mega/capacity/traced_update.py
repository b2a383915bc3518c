"""A rank's memory by an update that takes none: the trainer's own model, sharding and optimizer on fake tensors.

The collectives are those of torch's fake process group. Only the head's kernel is stood in for, because what it does
with its logits depends on their values; the stand-in keeps and allocates what the kernel does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from peft import PeftModel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.capacity.training_shape import HEAD_STRIP
from spiral_mega.config import Config
from spiral_mega.errors import UserError
from spiral_mega.kernels.logits import LinearLogprob
from spiral_mega.models.dimensions import read_dimensions
from spiral_mega.packing.balance import branches_of, cut
from spiral_mega.packing.training_sequence import TrainingSequence
from spiral_mega.packing.tree_batch import TreeBatch, pack
from spiral_mega.policy.fsdp import head
from spiral_mega.policy.fsdp.sharded_model import empty_model, materialise, shard
from spiral_mega.policy.optimizer import make_optimizer


@dataclass(frozen=True, slots=True)
class Traced:
    """Peak of one rank's tensors in an update, in bytes, by FSDPMemTracker's categories; and of which micro-batch."""

    peak: float
    parts: dict[str, float]
    tokens: int
    learnt: int


def trace(config: Config, world: int, batch: TreeBatch | None = None, scratch: int = 2 * HEAD_STRIP) -> Traced:
    """Trace an update of rank 0 of `world` on a micro-batch, by default a full one of the configuration's shape.

    `scratch`: bytes that the head's kernel works in (default: the GPU's strips). Starts a process group of its own, so
    none may be there; takes a few seconds a decoder layer.
    """
    if dist.is_initialized():
        raise UserError("a trace needs a process without ranks: run plan by itself, not under torchrun")
    batch = batch or full_batch(config)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with patch.object(head, "linear_logprob", _stand_in(scratch)):
            peak, parts = _run(config, batch)
    finally:
        dist.destroy_process_group()
    return Traced(peak, parts, batch.input_ids.numel(), len(batch.labels))


def _run(config: Config, batch: TreeBatch) -> tuple[float, dict[str, float]]:
    hf_config = read_dimensions(config.model)
    model, form = empty_model(config.model, hf_config, config.policy, "tree_torch", 0)
    shard(model, config.policy)
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialise(model, torch.device("cpu"))
        # The tracker sees FSDP's gathers where a module is called, so the head's method becomes the call itself.
        model.forward = MethodType(lambda self, *inputs: head._logprobs(_base(self), form, *inputs), model)
        model.train()
        optimizer = make_optimizer(model.parameters(), config.optimizer)
        _update(model, optimizer, batch, config)  # FSDP sets itself up at the first
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            _update(model, optimizer, batch, config)
        snapshot = tracker.get_tracker_snapshot("peak")
    ((_, found),) = snapshot.items()
    parts = {str(getattr(name, "value", name)): float(size) for name, size in found.items()}
    return parts.pop("Total"), parts


def _base(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _update(model: Any, optimizer: torch.optim.Optimizer, batch: TreeBatch, config: Config) -> None:
    """What FsdpPolicy.update does to memory, with one micro-batch: the tracker knows no more."""
    logprobs, _ = model(batch, config.rollout.sampling.temperature)
    torch.autograd.backward((logprobs[batch.gather_indices] * batch.weights).sum())
    del logprobs
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scratch: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(tensors[0])
        _ = tensors[0].new_empty(scratch, dtype=torch.uint8)
        outputs = [tensors[0].new_empty(rows, dtype=torch.float32) for _ in range(3)]
        ctx.save_for_backward(outputs[1], outputs[2], *tensors)
        ctx.scratch = scratch
        return outputs[0], outputs[2]

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, _, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        gradients: list[torch.Tensor | None] = []
        for i, (tensor, wanted) in enumerate(zip(tensors, needed, strict=True)):  # inputs (even) are summed wide
            wide = torch.float32 if i % 2 == 0 else tensor.dtype
            gradients.append(torch.zeros_like(tensor, dtype=wide) if wanted else None)
        _ = tensors[0].new_empty(ctx.scratch, dtype=torch.uint8)
        return None, *(None if g is None else g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True))


def _stand_in(scratch: int) -> Any:
    def linear_logprob(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, adapter: Any = None, **_: Any
    ) -> LinearLogprob:
        logprob, entropy = _Head.apply(scratch, hidden, weight, *(adapter or ()))  # type: ignore[no-untyped-call]
        return LinearLogprob(logprob, logprob, entropy)

    return linear_logprob


def full_batch(config: Config) -> TreeBatch:
    """The fullest micro-batch: parts of trees of one problem after another, with traces of equal length, as many as
    policy.microbatch_tokens holds."""
    budget = config.policy.microbatch_tokens
    chosen: list[TrainingSequence] = []
    for sequences in _problems(config):
        parts = sorted(cut(branches_of(sequences), budget), key=lambda part: -part.tokens)
        for part in parts:
            if part.tokens <= budget:
                budget -= part.tokens
                chosen += [sequence for sequence in sequences if sequence.key in set(part.keys)]
        if budget < config.policy.microbatch_tokens // 20:
            break
    return pack(chosen)


def _problems(config: Config) -> Iterator[list[TrainingSequence]]:
    """Problems of the configuration's shape with traces half as long as they may be, then ever shorter ones."""
    algorithm, limit = config.algorithm, config.rollout.sampling.max_response_tokens
    prompt = max(1, min(config.data.max_prompt_tokens, limit) // 2)
    for draw in range(64):
        rng = random.Random(draw)
        length = max(1, limit // 2 // (1 + draw))

        def text(count: int, rng: random.Random = rng) -> list[int]:
            return [rng.randrange(1, 1000) for _ in range(count)]

        start, header = text(prompt), text(prompt)
        traces = [text(length) for _ in range(algorithm.search_traces)]
        pairs = [(start, trace) for trace in traces]
        for _ in range(algorithm.num_sets if make_objective(algorithm).plan.largest_set else 0):
            members = sorted(rng.sample(range(len(traces)), algorithm.set_size))
            context = [*header, *(token for i in members for token in traces[i])]
            pairs += [(list(context), text(length)) for _ in range(algorithm.aggregation_traces)]
        yield [TrainingSequence((draw, i), p, r, [0.0] * len(r), 1.0, 1.0) for i, (p, r) in enumerate(pairs)]
