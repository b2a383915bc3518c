"""Work of the `spiral-mega plan` command: forecast memory and step time of a run on a cluster, as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.capacity import memory, tables
from spiral_mega.capacity.hardware import MACHINES, Machine
from spiral_mega.capacity.search import least_cache, remedies, search
from spiral_mega.capacity.step_time import StepTime, step_time
from spiral_mega.config import Config
from spiral_mega.errors import UserError
from spiral_mega.models.dimensions import ModelSizes, measure_model
from spiral_mega.models.model_config import resolve_model_config
from spiral_mega.policy.megatron.limits import check_layout
from spiral_mega.simulation.workload import Lengths


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` machines and the expected lengths of responses."""

    machine: Machine
    nodes: int
    lengths: Lengths

    @property
    def world(self) -> int:
        return self.nodes * self.machine.node_gpus


def forecast(
    config: Config,
    print_line: Callable[[str], object],
    *,
    nodes: int,
    gpu: str,
    gpus_per_node: int = 8,
    median_tokens: float = 1600.0,
    traced: bool = True,
    layouts: bool = False,
    picture: Path | None = None,
) -> bool:
    """Report memory and step time of the run on `nodes` nodes; return whether it fits.

    `traced` also traces an update's memory, `layouts` searches the fastest layouts that fit,
    `picture` is a PNG of memory through a step. Raises UserError for an unknown GPU, or a cluster
    or model that cannot be forecast.
    """
    if gpu not in MACHINES:
        raise UserError(f"--gpu is {gpu!r}: use one of {', '.join(MACHINES)}")
    machine = replace(MACHINES[gpu], node_gpus=gpus_per_node)
    cluster = Cluster(machine, nodes, Lengths(median=median_tokens))
    sizes = _checked_sizes(config, cluster.world)
    phases = memory.phases(config, sizes, cluster.world)
    print_line(
        f"{config.model.path}: {sizes.params / 1e9:.2f} B weights, "
        f"{sizes.trained_params / 1e6:,.0f} M trained, on {cluster.world} GPUs {gpu} ({nodes} "
        "nodes)\n"
    )
    print_line(tables.memory_table(phases))
    print_line("\n" + tables.summary(phases, machine))
    if traced:
        print_line("\n" + _trace(config, cluster.world, phases))
    cache_error = _cache_error(config, sizes)
    time = None if cache_error else _time(config, sizes, cluster)
    if cache_error:
        print_line("\n" + cache_error)
    elif time is None:
        print_line(
            "\nno step time: neither the embedded engine nor recipes with several levels are simulated"
        )
    else:
        print_line("\n" + tables.time_lines(time))
    fits_memory = memory.fits(config, sizes, cluster.world, machine)
    if not fits_memory:
        changes = remedies(config, sizes, cluster.world, machine)
        print_line(
            "\nDOES NOT FIT. These changes lower the peak:\n"
            + tables.remedy_lines(changes, machine)
        )
    if layouts and not _several_levels(config):
        print_line(
            "\nfastest layouts that fit (sampling simulated on one engine's share of the batch):"
        )
        print_line(tables.search_lines(search(config, sizes, machine, nodes, cluster.lengths)))
    print_line("\n" + tables.assumptions(config, sizes, machine, nodes, cluster.lengths))
    if picture is not None:
        tables.plot(
            phases, machine, time, f"{config.model.path} on {cluster.world} GPUs {gpu}", picture
        )
    return fits_memory and not cache_error


def _checked_sizes(config: Config, world: int) -> ModelSizes:
    """Measure the model; raise UserError for what cannot be forecast."""
    if config.two_models is not None:
        raise UserError(
            "two_models is set: plan supports one model; set two_models to null to forecast that"
        )
    parallel = config.rollout.engine.tensor_parallel
    if world % parallel:
        raise UserError(
            f"rollout.engine.tensor_parallel is {parallel}, which does not divide {world} GPUs"
        )
    hf_config = resolve_model_config(config.model)
    sizes = measure_model(hf_config, config.model.lora)
    if config.policy.backend == "megatron":
        check_layout(hf_config, config, world)
    elif sizes.experts:
        raise UserError("plan supports mixtures of experts on policy.backend=megatron only: set it")
    return sizes


def _trace(config: Config, world: int, phases: list[memory.Phase]) -> str:
    if config.policy.backend == "megatron":
        return "no trace: only FSDP2's sharding can be traced"
    from spiral_mega.capacity.traced_update import trace

    return tables.trace_lines(trace(config, world), phases)


def _cache_error(config: Config, sizes: ModelSizes) -> str:
    """Return why the KV cache is too small for one sequence; empty if it is large enough."""
    engine, needed = config.rollout.engine, least_cache(config, sizes)
    if engine.name != "vllm" or engine.kv_cache_mb >= needed:
        return ""
    return (
        f"rollout.engine.kv_cache_mb is {engine.kv_cache_mb}, but one sequence of "
        f"rollout.sampling.max_context_tokens takes {needed}: raise it"
    )


def _time(config: Config, sizes: ModelSizes, cluster: Cluster) -> StepTime | None:
    if config.rollout.engine.name != "vllm" or _several_levels(config):
        return None
    return step_time(config, sizes, cluster.machine, cluster.nodes, cluster.lengths)


def _several_levels(config: Config) -> bool:
    return len(make_objective(config.algorithm).plan.levels) > 1
