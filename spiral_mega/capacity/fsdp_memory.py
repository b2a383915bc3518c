"""Analytic memory of the FSDP2 policy, sharded over all ranks. Bytes throughout."""

from __future__ import annotations

from spiral_mega.capacity.policy_memory import FLOAT, HEAD_STRIP, RESPONSE_SHARE, PolicyMemory
from spiral_mega.config import Config
from spiral_mega.models.dimensions import ModelSizes, itemsize


def policy_memory(config: Config, sizes: ModelSizes, world: int) -> PolicyMemory:
    """Forecast what policy/fsdp takes of one rank."""
    shard = FLOAT * sizes.trained_params / world
    return PolicyMemory(
        resident=_weights(config, sizes, world),
        moments={"optimizer": 2 * shard},
        update=_forward_backward(config, sizes, world),
        step={"optimizer's scratch": shard, "gradients": shard},
    )


def activation_bytes(sizes: ModelSizes, item: int, *, frozen: bool) -> float:
    """Forecast what one decoder layer keeps of one token for its backward pass, without
    recomputation.

    Follows transformers' code: a norm keeps its input in float32, its result and, to train its
    weight, the tensor that it multiplies; rotary embedding keeps its result; the gated MLP keeps
    four tensors of its inner width. `item` is the bytes of one number in the compute dtype.
    """
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    normed = FLOAT if frozen else FLOAT + item
    norms = 2 * sizes.hidden * (normed + item)
    head_norms = (q + kv) * normed if sizes.qk_norm else 0
    attention = item * (2 * q + 2 * kv) + FLOAT * sizes.heads
    return norms + head_norms + attention + 4 * item * sizes.intermediate


def _weights(config: Config, sizes: ModelSizes, world: int) -> dict[str, float]:
    lora, kl = config.model.lora is not None, config.algorithm.kl
    weights = {
        "weights (float32 shards)": FLOAT
        * (sizes.trained_params + (sizes.params if lora else 0))
        / world
    }
    if kl is not None and (kl.reference is not None or not lora):
        weights["reference"] = FLOAT * sizes.params / world
    return weights


def _forward_backward(config: Config, sizes: ModelSizes, world: int) -> dict[str, float]:
    """Forecast the peak of a micro-batch: in the last layer's backward pass, or in the head's
    before it.

    Earlier micro-batches have left their gradients.
    """
    item = itemsize(config.policy.param_dtype)
    frozen = config.model.lora is not None
    # FSDP keeps the root's weights until backward and gathers one layer ahead; each gather has a
    # flat buffer.
    layer = sizes.layer_params + (sizes.trained_layer_params if frozen else 0)
    root = sizes.root_params + (sizes.trained_root_params if frozen else 0)
    head_gradient = item * (
        sizes.trained_root_params if frozen else sizes.vocabulary * sizes.hidden
    )
    return {
        "gathered weights": item * (root + 3 * layer),
        **_activations(config, sizes, item, frozen=frozen),
        "gradients": FLOAT * sizes.trained_params / world,
        "gradients not yet reduced": (item + FLOAT) * sizes.trained_layer_params + head_gradient,
    }


def _activations(config: Config, sizes: ModelSizes, item: int, *, frozen: bool) -> dict[str, float]:
    tokens = config.policy.microbatch_tokens
    checkpointing = config.policy.activation_checkpointing
    layer = activation_bytes(sizes, item, frozen=frozen)
    kept = item * sizes.hidden * sizes.layers if checkpointing else layer * sizes.layers
    recomputed = layer if checkpointing else 0
    # Gradients of the MLP's three inner tensors, and of the residual stream.
    layer_pass = tokens * (recomputed + item * (3 * sizes.intermediate + 2 * sizes.hidden))
    head_pass = RESPONSE_SHARE * tokens * sizes.hidden * (item + FLOAT) + 2 * HEAD_STRIP
    return {"activations": tokens * kept, "backward scratch": max(layer_pass, head_pass)}
