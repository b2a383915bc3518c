"""Analytic GPU memory of one rank through a training step: policy and engine together. Bytes
throughout.

    phase            resident policy   engine                  in addition
    sampling         weights, moments  weights, KV cache       vLLM's overhead
    training         weights, moments  asleep or the same      micro-batch
    optimizer step   weights           asleep or the same      moments, scratch
    weight sync      weights, moments  weights (cache last)    sync bucket

The policy's part comes from fsdp_memory.py or megatron_memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from spiral_mega.capacity import fsdp_memory, megatron_memory
from spiral_mega.capacity.hardware import CONTEXT_BYTES, ENGINE_OVERHEAD, FRAGMENTATION, Machine
from spiral_mega.capacity.policy_memory import PolicyMemory
from spiral_mega.config import Config
from spiral_mega.models.dimensions import ModelSizes, itemsize

ENGINE_WEIGHTS, CACHE = "engine weights", "KV cache"


@dataclass(frozen=True, slots=True)
class Phase:
    """The most that a rank holds during one phase of a step: bytes by purpose."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def phases(config: Config, sizes: ModelSizes, world: int) -> list[Phase]:
    """Forecast the phases of a step in order, each for the rank that holds most in it."""
    if config.policy.backend == "megatron":
        policies = megatron_memory.stages(config, sizes, world)
    else:
        policies = [fsdp_memory.policy_memory(config, sizes, world)]
    by_rank = [_phases(config, sizes, policy) for policy in policies]
    return [
        max(same_phase, key=lambda phase: phase.total) for same_phase in zip(*by_rank, strict=True)
    ]


def peak(config: Config, sizes: ModelSizes, world: int) -> Phase:
    """Return the phase that needs the most memory."""
    return max(phases(config, sizes, world), key=lambda phase: phase.total)


def fits(config: Config, sizes: ModelSizes, world: int, machine: Machine) -> bool:
    """Return whether every phase fits the machine's memory."""
    return peak(config, sizes, world).total <= machine.memory


def _phases(config: Config, sizes: ModelSizes, policy: PolicyMemory) -> list[Phase]:
    engine, item = config.rollout.engine, itemsize(config.policy.param_dtype)
    weights, cache = _engine_bytes(config, sizes)
    awake = {ENGINE_WEIGHTS: weights, CACHE: cache}
    while_training = {} if engine.sleep else awake
    while_syncing = {ENGINE_WEIGHTS: weights} if engine.sleep else awake  # the cache wakes last
    overhead = {} if engine.name == "transformers" else {"engine's own": ENGINE_OVERHEAD}
    base = {"context": CONTEXT_BYTES, **policy.resident}
    if not config.optimizer.offload:
        base |= policy.moments
    bucket = max(config.rollout.sync.bucket_mb * 2**20, sizes.vocabulary * sizes.hidden * item)
    parts = {
        "sampling": {**base, **awake, **overhead},
        "training": {**base, **while_training, **policy.update},
        "optimizer step": {**base, **while_training, **policy.moments, **policy.step},
        "weight sync": {**base, **while_syncing, **overhead, "sync bucket": 2 * bucket},
    }
    torch_tensors = (
        policy.resident.keys() | policy.update.keys() | policy.moments.keys() | policy.step.keys()
    )
    return [Phase(name, _with_fragmentation(each, torch_tensors)) for name, each in parts.items()]


def _with_fragmentation(parts: dict[str, float], torch_tensors: set[str]) -> dict[str, float]:
    allocated = sum(size for name, size in parts.items() if name in torch_tensors)
    return {**parts, "fragmentation": FRAGMENTATION * allocated}


def _engine_bytes(config: Config, sizes: ModelSizes) -> tuple[float, float]:
    """Forecast the engine's weights and KV cache on one rank."""
    engine, item = config.rollout.engine, itemsize(config.policy.param_dtype)
    head = (
        sizes.vocabulary * sizes.hidden if sizes.tied else 0
    )  # the engine has a head of its own even if it is tied
    weights = item * (sizes.params + head) / engine.tensor_parallel
    if engine.name == "vllm":
        return weights, engine.kv_cache_mb * 2**20
    cached_tokens = engine.max_num_seqs * config.rollout.sampling.max_context_tokens
    return weights, sizes.kv_bytes / 2 * item * cached_tokens
