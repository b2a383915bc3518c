"""Builds the engines that a configuration asks for."""

from __future__ import annotations

from spiral_mega.config import Config
from spiral_mega.config.model_set import DEFAULT_MODEL, model_configs
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import ConfigError
from spiral_mega.rollout.engine import Replica, RolloutEngine, Sampler, make_replica
from spiral_mega.rollout.two_engines import TwoEngines


def build_engines(
    config: Config, stop_ids: frozenset[int], runtime: Runtime
) -> tuple[Sampler, dict[str, RolloutEngine]]:
    """Return the run's sampler, and by model the engine that its weights go into. Collective.

    Two models that are adapters of the same weights share one vLLM engine with `rollout.sync.lora`
    "adapter"; otherwise each model has an engine of its own.
    """
    configs = model_configs(config)
    are_adapters = config.two_models is not None and config.two_models.form == "adapters"
    if are_adapters and config.rollout.sync.lora == "adapter":
        from spiral_mega.rollout.vllm_engine import VllmEngine

        replica = _make_replica(config, runtime)
        shared = VllmEngine(config, stop_ids, runtime, replica, models=tuple(configs))
        return shared, {name: shared.for_model(name) for name in configs}
    engines = {name: build_engine(each, stop_ids, runtime) for name, each in configs.items()}
    sampler = engines[DEFAULT_MODEL] if len(engines) == 1 else TwoEngines(engines)
    return sampler, engines


def build_engine(config: Config, stop_ids: frozenset[int], runtime: Runtime) -> RolloutEngine:
    """Return one model's engine, with weights yet to be loaded. Collective."""
    replica = _make_replica(config, runtime)
    if config.rollout.engine.name == "vllm":
        from spiral_mega.rollout.vllm_engine import VllmEngine

        return VllmEngine(config, stop_ids, runtime, replica)
    from spiral_mega.rollout.transformers_engine import TransformersEngine, empty_model

    return TransformersEngine(
        empty_model(config, runtime),
        temperature=config.rollout.sampling.temperature,
        stop_ids=stop_ids,
        max_num_seqs=config.rollout.engine.max_num_seqs,
        replica=replica,
    )


def _make_replica(config: Config, runtime: Runtime) -> Replica:
    ranks = config.rollout.engine.tensor_parallel
    if runtime.world_size % ranks:
        raise ConfigError(
            f"rollout.engine.tensor_parallel is {ranks}, which does not divide "
            f"{runtime.world_size} ranks"
        )
    return make_replica(runtime, ranks)
