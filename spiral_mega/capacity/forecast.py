"""The `spiral-mega plan` command's work: from a configuration and a cluster to a tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.capacity import memory, tables
from spiral_mega.capacity.hardware import MACHINES
from spiral_mega.capacity.search import least_cache, remedies, search
from spiral_mega.capacity.step_time import step_time
from spiral_mega.config import Config
from spiral_mega.errors import UserError
from spiral_mega.models.dimensions import measure, read_dimensions
from spiral_mega.policy.megatron.limits import check_layout
from spiral_mega.simulation.workload import Lengths


def plan(
    config: Config,
    say: Callable[[str], object],
    *,
    nodes: int,
    gpu: str,
    gpus_per_node: int = 8,
    median_tokens: float = 1600.0,
    traced: bool = True,
    layouts: bool = False,
    picture: Path | None = None,
) -> bool:
    """Say how the run of `config` would do on `nodes` nodes, and return whether it fits. Raises UserError for a cluster
    or model that is not known."""
    if gpu not in MACHINES:
        raise UserError(f"--gpu is {gpu!r}: use one of {', '.join(MACHINES)}")
    if config.two_models is not None:
        raise UserError("two_models is set: plan knows one model only; set it to null to see how that does")
    machine = replace(MACHINES[gpu], node_gpus=gpus_per_node)
    world, rollout = nodes * gpus_per_node, config.rollout
    if world % rollout.engine.tensor_parallel:
        raise UserError(
            f"rollout.engine.tensor_parallel is {rollout.engine.tensor_parallel}, which does not divide {world} GPUs"
        )
    dimensions = read_dimensions(config.model)
    sizes, megatron = measure(dimensions, config.model.lora), config.policy.backend == "megatron"
    if sizes.experts and not megatron:
        raise UserError("plan knows mixtures of experts on policy.backend=megatron only: set it")
    if megatron:
        check_layout(dimensions, config, world)
    lengths = Lengths(median=median_tokens)
    phases = memory.phases(config, sizes, world)
    say(
        f"{config.model.path}: {sizes.total / 1e9:.2f} B weights, {sizes.trained / 1e6:,.0f} M trained, "
        f"on {world} GPUs {gpu} ({nodes} nodes)\n"
    )
    say(tables.memory_table(phases))
    say("\n" + tables.summary(phases, machine))
    fits = memory.fits(config, sizes, world, machine)
    if traced and not megatron:
        from spiral_mega.capacity.traced_update import trace

        say("\n" + tables.trace_lines(trace(config, world), phases))
    elif traced:
        say("\nno trace: it runs FSDP2's sharding only")
    time = None
    levels = len(make_objective(config.algorithm).plan.levels) > 1
    short = rollout.engine.name == "vllm" and rollout.engine.kv_cache_mb < least_cache(config, sizes)
    if short:
        fits = False
        say(
            f"\nrollout.kv_cache_mb is {rollout.engine.kv_cache_mb}, but one sequence of rollout.sampling.max_context_tokens takes "
            f"{least_cache(config, sizes)}: raise it"
        )
    elif rollout.engine.name == "vllm" and not levels:
        time = step_time(config, sizes, machine, nodes, lengths)
        say("\n" + tables.time_lines(time))
    else:
        say("\nno step time: neither the embedded engine nor recipes of several levels are simulated")
    if not memory.fits(config, sizes, world, machine):
        say(
            "\nDOES NOT FIT. What would lower the peak:\n"
            + tables.remedy_lines(remedies(config, sizes, world, machine), machine)
        )
    if layouts and not levels:
        say("\nquickest layouts that fit (sampling from one engine's share of the batch):")
        say(tables.search_lines(search(config, sizes, machine, nodes, lengths)))
    say("\n" + tables.assumptions(config, sizes, machine, nodes, lengths))
    if picture is not None:
        title = f"{config.model.path} on {world} GPUs {gpu}"
        tables.plot(phases, machine, time, title, picture)
    return fits
