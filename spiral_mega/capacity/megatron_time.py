"""Training time of the Megatron policy: arithmetic plus collectives, which are not overlapped."""

from __future__ import annotations

from spiral_mega.capacity import flops
from spiral_mega.capacity.flops import Work
from spiral_mega.capacity.hardware import LINK_SHARE, TRAINING_SHARE, Machine
from spiral_mega.capacity.megatron_memory import rank_weights
from spiral_mega.capacity.policy_memory import FLOAT
from spiral_mega.config import Config
from spiral_mega.models.dimensions import ModelSizes, itemsize


def training_seconds(
    config: Config, sizes: ModelSizes, machine: Machine, world: int, work: Work
) -> float:
    """Forecast the forward and backward passes of a batch, in seconds, with ranks and experts
    equally busy.

    The stage with the head sets the pace; ranks wait while the pipeline fills and drains.
    """
    layout, policy = config.policy.megatron, config.policy
    tensor, context, pipeline = (
        layout.tensor_parallel,
        layout.context_parallel,
        layout.pipeline_parallel,
    )
    replicas = world / (tensor * context * pipeline)
    tokens = work.tokens / (replicas * context)  # of one rank, through all the layers that it has
    flops_per_second = machine.flops * TRAINING_SHARE
    arithmetic = (
        _slowest_stage_flops(config, sizes, work) / (replicas * context * tensor) / flops_per_second
    )
    collectives = (
        _tensor_parallel_seconds(config, sizes, machine, tokens)
        + _context_parallel_seconds(config, sizes, machine, tokens)
        + _expert_parallel_seconds(config, sizes, machine, tokens)
    )
    microbatches = max(1.0, work.tokens / (replicas * policy.microbatch_tokens))
    bubble = 1 + (pipeline - 1) / (layout.virtual_stages * microbatches)
    return float(
        bubble * (arithmetic + collectives) + _reduction_seconds(config, sizes, machine, world)
    )


def _tensor_parallel_seconds(
    config: Config, sizes: ModelSizes, machine: Machine, tokens: float
) -> float:
    """Of a layer's four products two gather their rows and two scatter them; backward one gathers its input again."""
    layout, item = config.policy.megatron, itemsize(config.policy.param_dtype)
    tensor, layers = layout.tensor_parallel, sizes.layers / layout.pipeline_parallel
    frozen, recompute = config.model.lora is not None, int(config.policy.activation_checkpointing)
    passes = 4 * (1 + recompute) + (4 if frozen or not layout.sequence_parallel else 6)
    sent = passes * layers * tokens * sizes.hidden * item * ((tensor - 1) / tensor)
    return sent / _link(machine, tensor, 1)


def _context_parallel_seconds(
    config: Config, sizes: ModelSizes, machine: Machine, tokens: float
) -> float:
    """Keys and values are gathered forward, and their gradients scattered backward."""
    layout, item = config.policy.megatron, itemsize(config.policy.param_dtype)
    tensor, context = layout.tensor_parallel, layout.context_parallel
    layers, recompute = (
        sizes.layers / layout.pipeline_parallel,
        int(config.policy.activation_checkpointing),
    )
    kv = 2 * sizes.kv_heads * sizes.head_dim / tensor
    sent = (2 + recompute) * layers * tokens * context * kv * item * (context - 1) / context
    return sent / _link(machine, context, tensor)


def _expert_parallel_seconds(
    config: Config, sizes: ModelSizes, machine: Machine, tokens: float
) -> float:
    """Tokens are dispatched to their experts and combined again."""
    layout, item = config.policy.megatron, itemsize(config.policy.param_dtype)
    experts, recompute = layout.expert_parallel, int(config.policy.activation_checkpointing)
    sparse_layers = sizes.moe_layers / layout.pipeline_parallel
    sent_per_token = sizes.experts_per_token * sizes.hidden * item * (experts - 1) / experts
    sent = 2 * (2 + recompute) * sparse_layers * tokens / layout.tensor_parallel * sent_per_token
    return sent / _link(machine, experts, 1)


def _reduction_seconds(config: Config, sizes: ModelSizes, machine: Machine, world: int) -> float:
    """Gradients are reduced in float32 and weights gathered, over the data-parallel copies."""
    layout, item = config.policy.megatron, itemsize(config.policy.param_dtype)
    weights = rank_weights(config, sizes, 0)
    trained = weights.adapters if config.model.lora is not None else weights.dense + weights.experts
    copies = world / (layout.tensor_parallel * layout.pipeline_parallel)
    sent = (FLOAT + item) * trained * (copies - 1) / copies
    return sent / _link(machine, int(copies), layout.tensor_parallel)


def _slowest_stage_flops(config: Config, sizes: ModelSizes, work: Work) -> float:
    """Count the FLOPs of the stage with the head."""
    frozen, checkpointing = config.model.lora is not None, config.policy.activation_checkpointing
    layers, head = Work(work.tokens, 0.0, work.pairs), Work(0.0, work.head_tokens, 0.0)
    layer_flops = flops.training(sizes, layers, frozen=frozen, checkpointing=checkpointing)
    head_flops = flops.training(sizes, head, frozen=frozen, checkpointing=checkpointing)
    if config.algorithm.kl is not None:
        layer_flops += flops.forward(sizes, layers)
        head_flops += flops.head(sizes, work.head_tokens)
    return layer_flops / config.policy.megatron.pipeline_parallel + head_flops


def _link(machine: Machine, members: int, stride: int) -> float:
    """Return the bytes/s into one GPU of a group of `members` ranks that are `stride` ranks apart.

    NVLink if the group fits a node; else the network cards of the members that share the node.
    """
    if members * stride <= machine.node_gpus:
        return LINK_SHARE * machine.node_link
    return LINK_SHARE * machine.network * max(1, machine.node_gpus // stride)
