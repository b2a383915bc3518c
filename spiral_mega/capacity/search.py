"""Other layouts: what would make a run fit, and which of those that fit takes the shortest step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from spiral_mega.capacity import memory
from spiral_mega.capacity.hardware import GIB, Machine
from spiral_mega.capacity.step_time import StepTime, step_time
from spiral_mega.config import Config
from spiral_mega.models.dimensions import Sizes
from spiral_mega.simulation.workload import Lengths

Changes = dict[str, Any]
CACHE_STEP_MB = 2048
CACHE = "KV cache"


@dataclass(frozen=True, slots=True)
class Layout:
    """Keys changed from the configuration, the memory at the most, and the step's time."""

    changes: Changes
    peak: float
    time: StepTime


def changed(config: Config, changes: Changes) -> Config:
    """`config` with dotted keys set."""
    values = config.model_dump()
    for key, value in changes.items():
        section, name = key.split(".")
        values[section][name] = value
    return Config.model_validate(values)


def remedies(config: Config, sizes: Sizes, world: int, machine: Machine) -> list[tuple[Changes, float]]:
    """Single changes, in order of what they cost, each with the peak that it leads to; those that lower it."""
    now = memory.peak(config, sizes, world).total
    found = []
    for changes in _single(config, sizes, world, machine):
        peak = memory.peak(changed(config, changes), sizes, world).total
        if peak < now - 0.1 * GIB:
            found.append((changes, peak))
    return found


def _single(config: Config, sizes: Sizes, world: int, machine: Machine) -> Iterator[Changes]:
    rollout, policy = config.rollout, config.policy
    if rollout.engine.name == "vllm" and not rollout.engine.sleep:
        yield {"rollout.engine.sleep": True}
    if not policy.activation_checkpointing:
        yield {"policy.activation_checkpointing": True}
    if policy.microbatch_tokens > rollout.sampling.max_context_tokens:
        yield {"policy.microbatch_tokens": rollout.sampling.max_context_tokens}
    if (
        rollout.engine.name == "vllm"
        and (cache := largest_cache(config, sizes, world, machine)) < rollout.engine.kv_cache_mb
    ):
        yield {"rollout.engine.kv_cache_mb": max(cache, least_cache(config, sizes))}
    if not config.optimizer.offload and config.model.lora is None and policy.backend == "fsdp":
        yield {"optimizer.offload": True}
    if rollout.engine.name == "vllm" and rollout.engine.tensor_parallel < machine.node_gpus:
        yield {"rollout.engine.tensor_parallel": 2 * rollout.engine.tensor_parallel}


def least_cache(config: Config, sizes: Sizes) -> int:
    """MiB of KV cache on a rank in which one sequence of the longest context has room."""
    needed = sizes.kv_bytes * config.rollout.sampling.max_context_tokens / config.rollout.engine.tensor_parallel
    return int(-(-needed // 2**20))


def largest_cache(config: Config, sizes: Sizes, world: int, machine: Machine) -> int:
    """MiB of KV cache for which there is room in every phase that holds it; 0 if none, or if another phase is too
    large."""
    phases = memory.phases(config, sizes, world)
    room = machine.memory - max(p.total - p.parts[CACHE] for p in phases if CACHE in p.parts)
    if any(phase.total > machine.memory for phase in phases if CACHE not in phase.parts):
        return 0
    return max(0, int(room / 2**20) // CACHE_STEP_MB * CACHE_STEP_MB)


def search(
    config: Config, sizes: Sizes, machine: Machine, nodes: int, lengths: Lengths, count: int = 5
) -> list[Layout]:
    """The quickest layouts that fit, by engine size, KV cache, recomputation and micro-batch; times as step_time with
    an engine's share of the batch. Only for the vLLM engine; else empty."""
    if config.rollout.engine.name != "vllm":
        return []
    world = nodes * machine.node_gpus
    found = []
    context = config.rollout.sampling.max_context_tokens
    sizes_of_engines = [size for size in (1, 2, 4, 8) if size <= machine.node_gpus and sizes.kv_heads % size == 0]
    for parallel, again, tokens, sleep in product(
        sizes_of_engines, (False, True), (context, 2 * context, 4 * context), (True, False)
    ):
        changes = {
            "rollout.engine.tensor_parallel": parallel,
            "rollout.engine.sleep": sleep,
            "policy.activation_checkpointing": again,
            "policy.microbatch_tokens": tokens,
        }
        layout = changed(config, changes)
        changes["rollout.engine.kv_cache_mb"] = cache = largest_cache(layout, sizes, world, machine)
        if cache < least_cache(layout, sizes):
            continue
        layout = changed(config, changes)
        time = step_time(layout, sizes, machine, nodes, lengths, exact=False)
        found.append(Layout(changes, memory.peak(layout, sizes, world).total, time))
    return sorted(found, key=lambda layout: layout.time.total)[:count]
