"""Measure one rank's memory by an update on fake tensors: the trainer's own model, sharding and
optimizer.

Collectives are those of torch's fake process group. Only the head's kernel is replaced, because
what it does with its logits depends on their values; the replacement saves and allocates what the
kernel does.
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
from spiral_mega.capacity.policy_memory import HEAD_STRIP
from spiral_mega.config import Config
from spiral_mega.errors import UserError
from spiral_mega.kernels.logits import LinearLogprob
from spiral_mega.models.model_config import resolve_model_config
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree_batch import TreeBatch, pack
from spiral_mega.packing.tree_parts import cut_tree, make_branches
from spiral_mega.policy.fsdp import head
from spiral_mega.policy.fsdp.sharded_model import allocate_weights, apply_fsdp, build_empty_model
from spiral_mega.policy.optimizer import make_optimizer


@dataclass(frozen=True, slots=True)
class Traced:
    """Peak of one rank's tensors in an update, in bytes, in all and by FSDPMemTracker's categories.

    `tokens` and `head_tokens` describe the micro-batch.
    """

    peak: float
    parts: dict[str, float]
    tokens: int
    head_tokens: int


def trace(
    config: Config, world: int, batch: TreeBatch | None = None, scratch: int = 2 * HEAD_STRIP
) -> Traced:
    """Trace an update of rank 0 of `world` on a micro-batch, by default a full one of the
    configuration's shape.

    `scratch` are the bytes that the head's kernel works in (default: the GPU's strips). Takes a few
    seconds per decoder layer. Starts a process group of its own; raises UserError if there is one
    already.
    """
    if dist.is_initialized():
        raise UserError(
            "a trace needs a process without ranks: run `spiral-mega plan` without torchrun"
        )
    batch = batch or full_batch(config)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with patch.object(head, "linear_logprob", _kernel_replacement(scratch)):
            peak, parts = _run(config, batch)
    finally:
        dist.destroy_process_group()
    return Traced(peak, parts, batch.input_ids.numel(), len(batch.labels))


def _run(config: Config, batch: TreeBatch) -> tuple[float, dict[str, float]]:
    hf_config = resolve_model_config(config.model)
    model, form = build_empty_model(config.model, hf_config, config.policy, "tree_torch", 0)
    apply_fsdp(model, config.policy)
    with FakeTensorMode(allow_non_fake_inputs=True):
        allocate_weights(model, torch.device("cpu"))
        # The tracker sees FSDP's gathers only when a module is called, so the head's method becomes
        # the call.
        model.forward = MethodType(
            lambda self, *inputs: head._logprobs(_base(self), form, *inputs), model
        )
        model.train()
        optimizer = make_optimizer(model.parameters(), config.optimizer)
        _update(model, optimizer, batch, config)  # the first update initialises FSDP
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
    """Do what FsdpPolicy.update does to memory, with one micro-batch: the tracker supports no more."""
    logprobs, _ = model(batch, config.rollout.sampling.temperature)
    torch.autograd.backward((logprobs[batch.gather_indices] * batch.weights).sum())
    del logprobs
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class _Head(torch.autograd.Function):
    """Allocates and saves what the head's kernel does; computes nothing."""

    @staticmethod
    def forward(
        ctx: Any, scratch: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        wide: list[torch.Tensor | None] = []
        for i, (tensor, wanted) in enumerate(zip(tensors, needed, strict=True)):
            dtype = (
                torch.float32 if i % 2 == 0 else tensor.dtype
            )  # inputs (even) accumulate in float32
            wide.append(torch.zeros_like(tensor, dtype=dtype) if wanted else None)
        _ = tensors[0].new_empty(ctx.scratch, dtype=torch.uint8)
        gradients = [
            None if g is None else g.to(t.dtype) for g, t in zip(wide, tensors, strict=True)
        ]
        return None, *gradients


def _kernel_replacement(scratch: int) -> Any:
    def linear_logprob(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        *,
        adapter: Any = None,
        **_: Any,
    ) -> LinearLogprob:
        logprob, entropy = _Head.apply(scratch, hidden, weight, *(adapter or ()))  # type: ignore[no-untyped-call]
        return LinearLogprob(logprob, logprob, entropy)

    return linear_logprob


def full_batch(config: Config) -> TreeBatch:
    """Build the fullest micro-batch: parts of trees, problem after problem, up to
    policy.microbatch_tokens.

    A problem's traces have equal lengths.
    """
    budget = config.policy.microbatch_tokens
    chosen: list[TrainingSequence] = []
    for sequences in _problems(config):
        parts = sorted(cut_tree(make_branches(sequences), budget), key=lambda part: -part.tokens)
        for part in parts:
            if part.tokens <= budget:
                budget -= part.tokens
                chosen += [sequence for sequence in sequences if sequence.key in set(part.keys)]
        if budget < config.policy.microbatch_tokens // 20:
            break
    return pack(chosen)


def _problems(config: Config) -> Iterator[list[TrainingSequence]]:
    """Yield problems of the configuration's shape: traces of half the longest length, then shorter and shorter ones."""
    algorithm, limit = config.algorithm, config.rollout.sampling.max_response_tokens
    prompt_length = max(1, min(config.data.max_prompt_tokens, limit) // 2)
    num_sets = algorithm.num_sets if make_objective(algorithm).plan.largest_set else 0
    for index in range(64):
        rng = random.Random(index)
        length = max(1, limit // 2 // (1 + index))
        prompt, header = _random_tokens(rng, prompt_length), _random_tokens(rng, prompt_length)
        traces = [_random_tokens(rng, length) for _ in range(algorithm.search_traces)]
        pairs = [(prompt, trace) for trace in traces]
        for _ in range(num_sets):
            members = sorted(rng.sample(range(len(traces)), algorithm.set_size))
            context = header.copy()
            for member in members:
                context += traces[member]
            for _ in range(algorithm.aggregation_traces):
                pairs.append((context.copy(), _random_tokens(rng, length)))
        yield [_sequence(index, i, *pair) for i, pair in enumerate(pairs)]


def _random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 1000) for _ in range(count)]


def _sequence(
    index: int, position: int, prompt: list[int], response: list[int]
) -> TrainingSequence:
    return TrainingSequence(
        SequenceKey(index, position), prompt, response, [0.0] * len(response), 1.0, 1.0
    )
