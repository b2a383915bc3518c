"""Search other layouts: changes that make a run fit, and the fastest layouts that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from spiral_mega.capacity import memory
from spiral_mega.capacity.hardware import GIB, Machine
from spiral_mega.capacity.memory import CACHE
from spiral_mega.capacity.step_time import StepTime, step_time
from spiral_mega.config import Config
from spiral_mega.models.dimensions import ModelSizes
from spiral_mega.simulation.workload import Lengths

Changes = dict[str, Any]  # dotted key: value
CACHE_STEP_MB = 2048


@dataclass(frozen=True, slots=True)
class Layout:
    """Keys that differ from the configuration, peak memory in bytes, and the time of a step."""

    changes: Changes
    peak: float
    time: StepTime


def changed(config: Config, changes: Changes) -> Config:
    """Return `config` with dotted keys replaced."""
    values = config.model_dump()
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        section = values
        for parent in parents:
            section = section[parent]
        section[leaf] = value
    return Config.model_validate(values)


def remedies(
    config: Config, sizes: ModelSizes, world: int, machine: Machine
) -> list[tuple[Changes, float]]:
    """Return single changes that lower the peak, cheapest first, each with the peak in bytes that results."""
    now = memory.peak(config, sizes, world).total
    found = []
    for changes in _single_changes(config, sizes, world, machine):
        peak = memory.peak(changed(config, changes), sizes, world).total
        if peak < now - 0.1 * GIB:
            found.append((changes, peak))
    return found


def _single_changes(
    config: Config, sizes: ModelSizes, world: int, machine: Machine
) -> Iterator[Changes]:
    engine, policy = config.rollout.engine, config.policy
    context = config.rollout.sampling.max_context_tokens
    vllm = engine.name == "vllm"
    if vllm and not engine.sleep:
        yield {"rollout.engine.sleep": True}
    if not policy.activation_checkpointing:
        yield {"policy.activation_checkpointing": True}
    if policy.microbatch_tokens > context:
        yield {"policy.microbatch_tokens": context}
    if vllm:
        cache = largest_cache(config, sizes, world, machine)
        if cache < engine.kv_cache_mb:
            yield {"rollout.engine.kv_cache_mb": max(cache, least_cache(config, sizes))}
    if not config.optimizer.offload and config.model.lora is None and policy.backend == "fsdp":
        yield {"optimizer.offload": True}
    if vllm and engine.tensor_parallel < machine.node_gpus:
        yield {"rollout.engine.tensor_parallel": 2 * engine.tensor_parallel}


def least_cache(config: Config, sizes: ModelSizes) -> int:
    """Return the MiB of KV cache on a rank that one sequence of the longest context needs."""
    rollout = config.rollout
    needed = sizes.kv_bytes * rollout.sampling.max_context_tokens / rollout.engine.tensor_parallel
    return int(-(-needed // 2**20))


def largest_cache(config: Config, sizes: ModelSizes, world: int, machine: Machine) -> int:
    """Return the MiB of KV cache that fit in every phase that holds it; 0 if a phase without it is too large."""
    phases = memory.phases(config, sizes, world)
    with_cache = [phase for phase in phases if CACHE in phase.parts]
    without_cache = [phase for phase in phases if CACHE not in phase.parts]
    if any(phase.total > machine.memory for phase in without_cache):
        return 0
    free = machine.memory - max(phase.total - phase.parts[CACHE] for phase in with_cache)
    return max(0, int(free / 2**20) // CACHE_STEP_MB * CACHE_STEP_MB)


def search(
    config: Config,
    sizes: ModelSizes,
    machine: Machine,
    nodes: int,
    lengths: Lengths,
    count: int = 5,
) -> list[Layout]:
    """Return the `count` fastest layouts that fit, over engine size, KV cache, recomputation,
    micro-batch and sleep.

    Step times are `step_time`'s on one engine's share of the batch. Only for the vLLM engine; empty
    for others.
    """
    if config.rollout.engine.name != "vllm":
        return []
    world = nodes * machine.node_gpus
    found = []
    for changes in _candidates(config, sizes, machine):
        layout = changed(config, changes)
        cache = largest_cache(layout, sizes, world, machine)
        if cache < least_cache(layout, sizes):
            continue
        changes["rollout.engine.kv_cache_mb"] = cache
        layout = changed(config, changes)
        time = step_time(layout, sizes, machine, nodes, lengths, exact=False)
        found.append(Layout(changes, memory.peak(layout, sizes, world).total, time))
    return sorted(found, key=lambda layout: layout.time.total)[:count]


def _candidates(config: Config, sizes: ModelSizes, machine: Machine) -> Iterator[Changes]:
    context = config.rollout.sampling.max_context_tokens
    engine_sizes = [
        size for size in (1, 2, 4, 8) if size <= machine.node_gpus and sizes.kv_heads % size == 0
    ]
    microbatches = (context, 2 * context, 4 * context)
    for parallel, checkpointing, tokens, sleep in product(
        engine_sizes, (False, True), microbatches, (True, False)
    ):
        yield {
            "rollout.engine.tensor_parallel": parallel,
            "rollout.engine.sleep": sleep,
            "policy.activation_checkpointing": checkpointing,
            "policy.microbatch_tokens": tokens,
        }
