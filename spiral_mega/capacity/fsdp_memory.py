"""Memory of the FSDP2 policy, sharded over all ranks. Bytes throughout."""

from __future__ import annotations

from spiral_mega.capacity.training_shape import FLOAT, HEAD_STRIP, SHARE_LEARNT, Training
from spiral_mega.config import Config
from spiral_mega.models.dimensions import Sizes, itemsize


def training(config: Config, sizes: Sizes, world: int) -> Training:
    """What policy/fsdp takes of a rank."""
    activations, gathered, gradients = _forward_backward(config, sizes, world)
    return Training(
        held=_weights(config, sizes, world),
        moments={"optimizer": 2 * FLOAT * sizes.trained / world},
        update={**gathered, **activations, **gradients},
        step={
            "optimizer's scratch": FLOAT * sizes.trained / world,
            "gradients": FLOAT * sizes.trained / world,
        },
    )


def activation_bytes(sizes: Sizes, item: int, *, frozen: bool) -> float:
    """What a decoder layer keeps of one token for its backward pass, without recomputation.

    As transformers computes it: norms keep their input in float32, their result and, to train their weight, what it
    multiplies; rotary embedding keeps its result, the gated MLP four tensors of its inner width.
    """
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    normed = FLOAT if frozen else FLOAT + item
    norms = 2 * sizes.hidden * (normed + item)
    head_norms = (q + kv) * normed if sizes.head_norms else 0
    attention = item * (2 * q + 2 * kv) + FLOAT * sizes.heads
    return norms + head_norms + attention + 4 * item * sizes.intermediate


def _weights(config: Config, sizes: Sizes, world: int) -> dict[str, float]:
    lora, kl = config.model.lora is not None, config.algorithm.kl
    weights = {"weights (float32 shards)": FLOAT * (sizes.trained + (sizes.total if lora else 0)) / world}
    if kl is not None and (kl.reference is not None or not lora):
        weights["reference"] = FLOAT * sizes.total / world
    return weights


def _forward_backward(
    config: Config, sizes: Sizes, world: int
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Activations, gathered weights and gradients at the peak: in the last layer's backward pass, or the head's before
    it. Earlier micro-batches have left their gradients."""
    policy, item = config.policy, itemsize(config.policy.param_dtype)
    tokens = policy.microbatch_tokens
    learnt = SHARE_LEARNT * tokens
    frozen = config.model.lora is not None
    whole = activation_bytes(sizes, item, frozen=frozen)
    kept = item * sizes.hidden * sizes.layers if policy.activation_checkpointing else whole * sizes.layers
    again = whole if policy.activation_checkpointing else 0
    # Gradients of an MLP's three inner tensors, and of the residual stream.
    layer_pass = tokens * (again + item * (3 * sizes.intermediate + 2 * sizes.hidden))
    head_pass = learnt * sizes.hidden * (item + FLOAT) + 2 * HEAD_STRIP
    # FSDP keeps the root's weights from forward to backward, and gathers a layer ahead; each gather has a flat buffer.
    layer = sizes.layer + (sizes.trained_layer if frozen else 0)
    root = sizes.root + (sizes.trained_root if frozen else 0)
    gathered = item * (root + 3 * layer)
    head_gradient = item * (sizes.trained_root if frozen else sizes.vocabulary * sizes.hidden)
    unreduced = (item + FLOAT) * sizes.trained_layer + head_gradient
    return (
        {"activations": tokens * kept, "backward scratch": max(layer_pass, head_pass)},
        {"gathered weights": gathered},
        {"gradients": FLOAT * sizes.trained / world, "gradients not yet reduced": unreduced},
    )
