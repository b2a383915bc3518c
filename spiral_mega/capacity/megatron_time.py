"""How long the Megatron policy trains on a batch: arithmetic, and its collectives, which nothing hides."""

from __future__ import annotations

from spiral_mega.capacity import flops
from spiral_mega.capacity.flops import Work
from spiral_mega.capacity.hardware import LINK_SHARE, TRAINING_SHARE, Machine
from spiral_mega.capacity.megatron_memory import weights_of
from spiral_mega.capacity.training_shape import FLOAT
from spiral_mega.config import Config
from spiral_mega.models.dimensions import Sizes, itemsize


def training(config: Config, sizes: Sizes, machine: Machine, world: int, work: Work) -> float:
    """Seconds of forward and backward passes, with ranks and experts equally busy. The stage with the head sets the
    pace; while the pipeline fills and drains, ranks wait."""
    layout, policy, item = config.policy.megatron, config.policy, itemsize(config.policy.param_dtype)
    tensor, context, pipeline = layout.tensor_parallel, layout.context_parallel, layout.pipeline_parallel
    replicas = world / (tensor * context * pipeline)
    frozen, again = config.model.lora is not None, int(policy.activation_checkpointing)
    tokens = work.tokens / (replicas * context)  # a rank's, through all the layers that it has
    arithmetic = _arithmetic(config, sizes, work) / (replicas * context * tensor) / (machine.flops * TRAINING_SHARE)
    others, layers = (tensor - 1) / tensor, sizes.layers / pipeline
    # Of a layer's four products two gather their rows and two scatter them; backward one gathers its input anew.
    passes = 4 * (1 + again) + (4 if frozen or not layout.sequence_parallel else 6)
    within = passes * layers * tokens * sizes.hidden * item * others / _link(machine, tensor, 1)
    kv = 2 * sizes.kv_heads * sizes.head_dim / tensor
    rows = (2 + again) * layers * tokens * context * kv * item * (context - 1) / context
    within += rows / _link(machine, context, tensor)
    sent = sizes.experts_per_token * sizes.hidden * item * (layout.expert_parallel - 1) / layout.expert_parallel
    exchanges = 2 * (2 + again) * sizes.sparse / pipeline * tokens / tensor * sent
    within += exchanges / _link(machine, layout.expert_parallel, 1)
    microbatches = max(1.0, work.tokens / (replicas * policy.microbatch_tokens))
    bubble = 1 + (pipeline - 1) / (layout.virtual_stages * microbatches)
    held = weights_of(config, sizes, 0)
    trained = held.adapters if frozen else held.dense + held.experts
    copies = world / (tensor * pipeline)
    reduced = (FLOAT + item) * trained * (copies - 1) / copies / _link(machine, int(copies), tensor)
    return float(bubble * (arithmetic + within) + reduced)


def _arithmetic(config: Config, sizes: Sizes, work: Work) -> float:
    """FLOPs of the slowest stage."""
    frozen, again = config.model.lora is not None, config.policy.activation_checkpointing
    layers = Work(work.tokens, 0.0, work.pairs)
    total = flops.training(sizes, layers, frozen=frozen, checkpointing=again)
    head = flops.training(sizes, Work(0.0, work.learnt, 0.0), frozen=frozen, checkpointing=again)
    if config.algorithm.kl is not None:
        total += flops.forward(sizes, layers)
        head += flops.head(sizes, work.learnt)
    return total / config.policy.megatron.pipeline_parallel + head


def _link(machine: Machine, members: int, apart: int) -> float:
    """Bytes a second into one GPU of a group of `members` ranks, `apart` from one another: over NVLink where all are in
    a node, else over the network cards of those of them that are."""
    if members * apart <= machine.node_gpus:
        return LINK_SHARE * machine.node_link
    return LINK_SHARE * machine.network * max(1, machine.node_gpus // apart)
