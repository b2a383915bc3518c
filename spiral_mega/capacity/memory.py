"""An analytic model of a rank's GPU memory through a step. Bytes throughout.

What the policy takes comes from fsdp_memory.py or megatron_memory.py; here it meets the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from spiral_mega.capacity import fsdp_memory, megatron_memory
from spiral_mega.capacity.hardware import CONTEXT_BYTES, ENGINE_OVERHEAD, FRAGMENTATION, Machine
from spiral_mega.capacity.training_shape import Training
from spiral_mega.config import Config
from spiral_mega.models.dimensions import Sizes, itemsize


@dataclass(frozen=True, slots=True)
class Phase:
    """What a rank holds at the most during a part of a step: bytes by what they are for."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def phases(config: Config, sizes: Sizes, world: int) -> list[Phase]:
    """The parts of a step in order, each of the rank that holds most in it."""
    trainings = (
        megatron_memory.stages(config, sizes, world)
        if config.policy.backend == "megatron"
        else [fsdp_memory.training(config, sizes, world)]
    )
    every = [_phases(config, sizes, training) for training in trainings]
    return [max(same, key=lambda phase: phase.total) for same in zip(*every, strict=True)]


def _phases(config: Config, sizes: Sizes, training: Training) -> list[Phase]:
    engine, cache = _engine(config, sizes)
    asleep = {} if config.rollout.engine.sleep else {"engine weights": engine, "KV cache": cache}
    awake = {"engine weights": engine, "KV cache": cache}
    loading = {
        "engine weights": engine,
        **({} if config.rollout.engine.sleep else {"KV cache": cache}),
    }  # the cache wakes last
    base = {"context": CONTEXT_BYTES}
    held = {**training.held, **({} if config.optimizer.offload else training.moments)}
    bucket = max(
        config.rollout.sync.bucket_mb * 2**20, sizes.vocabulary * sizes.hidden * itemsize(config.policy.param_dtype)
    )
    overhead = {} if config.rollout.engine.name == "transformers" else {"engine's own": ENGINE_OVERHEAD}
    plan = [
        ("sampling", {**base, **held, **awake, **overhead}),
        ("training", {**base, **held, **asleep, **training.update}),
        ("optimizer step", {**base, **held, **asleep, **training.moments, **training.step}),
        ("weight sync", {**base, **held, **loading, **overhead, "sync bucket": 2 * bucket}),
    ]
    ours = set(held) | set(training.update) | set(training.moments) | set(training.step)
    return [
        Phase(name, {**parts, "fragmentation": FRAGMENTATION * sum(parts.get(key, 0.0) for key in ours)})
        for name, parts in plan
    ]


def peak(config: Config, sizes: Sizes, world: int) -> Phase:
    """The phase that needs the most."""
    return max(phases(config, sizes, world), key=lambda phase: phase.total)


def fits(config: Config, sizes: Sizes, world: int, machine: Machine) -> bool:
    return peak(config, sizes, world).total <= machine.memory


def _engine(config: Config, sizes: Sizes) -> tuple[float, float]:
    item = itemsize(config.policy.param_dtype)
    head = sizes.vocabulary * sizes.hidden if sizes.tied else 0  # the engine's head is its own, also where it is tied
    weights = item * (sizes.total + head) / config.rollout.engine.tensor_parallel
    if config.rollout.engine.name == "transformers":
        return (
            weights,
            sizes.kv_bytes / 2 * item * config.rollout.engine.max_num_seqs * config.rollout.sampling.max_context_tokens,
        )
    return weights, config.rollout.engine.kv_cache_mb * 2**20
