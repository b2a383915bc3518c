"""An analytic model of a rank's GPU memory through a step, with FSDP2 over all ranks. Bytes throughout."""

from __future__ import annotations

from dataclasses import dataclass

from spiral_mega.config import Config
from spiral_mega.plan.hardware import CONTEXT_BYTES, ENGINE_OVERHEAD, FRAGMENTATION, Machine
from spiral_mega.plan.model import Sizes, itemsize

FLOAT = 4
HEAD_STRIP = 128 * 2**20  # of logits' gradients; kernels/gpu.py
SHARE_LEARNT = 0.95  # of a micro-batch's tokens that are response tokens, and so reach the head


@dataclass(frozen=True, slots=True)
class Phase:
    """What a rank holds at the most during a part of a step: bytes by what they are for."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def phases(config: Config, sizes: Sizes, world: int) -> list[Phase]:
    """The parts of a step in order. What is trained is policy/fsdp's, the engine `config.rollout`'s."""
    state, moments = _state(config, sizes, world)
    engine, cache = _engine(config, sizes)
    asleep = {} if config.rollout.sleep else {"engine weights": engine, "KV cache": cache}
    awake = {"engine weights": engine, "KV cache": cache}
    loading = {
        "engine weights": engine,
        **({} if config.rollout.sleep else {"KV cache": cache}),
    }  # the cache wakes last
    base = {"context": CONTEXT_BYTES}
    activations, gathered, gradients = _forward_backward(config, sizes, world)
    training = {**state, **({} if config.optimizer.offload else moments)}
    step_only = {"optimizer": moments["optimizer"], "optimizer's scratch": FLOAT * sizes.trained / world}
    bucket = max(
        config.rollout.sync_bucket_mb * 2**20, sizes.vocabulary * sizes.hidden * itemsize(config.policy.param_dtype)
    )
    overhead = {} if config.rollout.engine == "transformers" else {"engine's own": ENGINE_OVERHEAD}
    plan = [
        ("sampling", {**base, **training, **awake, **overhead}),
        ("training", {**base, **training, **asleep, **gathered, **activations, **gradients}),
        ("optimizer step", {**base, **training, **asleep, **step_only, "gradients": FLOAT * sizes.trained / world}),
        ("weight sync", {**base, **training, **loading, **overhead, "sync bucket": 2 * bucket}),
    ]
    ours = set(training) | set(activations) | set(gathered) | set(gradients) | set(step_only)
    return [
        Phase(name, {**parts, "fragmentation": FRAGMENTATION * sum(parts.get(key, 0.0) for key in ours)})
        for name, parts in plan
    ]


def peak(config: Config, sizes: Sizes, world: int) -> Phase:
    """The phase that needs the most."""
    return max(phases(config, sizes, world), key=lambda phase: phase.total)


def fits(config: Config, sizes: Sizes, world: int, machine: Machine) -> bool:
    return peak(config, sizes, world).total <= machine.memory


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


def _state(config: Config, sizes: Sizes, world: int) -> tuple[dict[str, float], dict[str, float]]:
    lora, kl = config.model.lora is not None, config.algorithm.kl
    weights = {"weights (float32 shards)": FLOAT * (sizes.trained + (sizes.total if lora else 0)) / world}
    if kl is not None and (kl.reference is not None or not lora):
        weights["reference"] = FLOAT * sizes.total / world
    return (
        weights,
        {"optimizer": 2 * FLOAT * sizes.trained / world},
    )


def _engine(config: Config, sizes: Sizes) -> tuple[float, float]:
    item = itemsize(config.policy.param_dtype)
    head = sizes.vocabulary * sizes.hidden if sizes.tied else 0  # the engine's head is its own, also where it is tied
    weights = item * (sizes.total + head) / config.rollout.tensor_parallel
    if config.rollout.engine == "transformers":
        return weights, sizes.kv_bytes / 2 * item * config.rollout.max_batch * config.rollout.max_context_tokens
    return weights, config.rollout.kv_cache_mb * 2**20


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
