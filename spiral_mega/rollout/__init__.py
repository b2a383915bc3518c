"""Sampling: the engine protocol and engines, the search-to-aggregation pipeline, and the batch of a step."""

from spiral_mega.config import Config
from spiral_mega.config.model_set import DEFAULT_MODEL, model_configs
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import ConfigError
from spiral_mega.rollout.engine import Replica, RolloutEngine, Sampler, make_replica
from spiral_mega.rollout.two_engines import TwoEngines

__all__ = ["RolloutEngine", "Sampler", "build_engine", "build_engines"]


def build_engines(
    config: Config, stop_ids: frozenset[int], runtime: Runtime
) -> tuple[Sampler, dict[str, RolloutEngine]]:
    """What samples for the run, and by model's name what takes that model's weights. Collective."""
    configs = model_configs(config)
    if config.two_models is not None and config.two_models.form == "adapters" and config.rollout.sync.lora == "adapter":
        from spiral_mega.rollout.vllm_engine import VllmEngine

        replica = _replica(config, runtime)
        engine = VllmEngine(config, stop_ids, runtime, replica, models=tuple(configs))
        return engine, {name: engine.for_model(name) for name in configs}
    engines = {name: build_engine(each, stop_ids, runtime) for name, each in configs.items()}
    return engines[DEFAULT_MODEL] if len(engines) == 1 else TwoEngines(engines), engines


def build_engine(config: Config, stop_ids: frozenset[int], runtime: Runtime) -> RolloutEngine:
    """The engine of one model, on what `rollout.engine.name` names, without weights: its policy's are loaded into it.

    Collective.
    """
    replica = _replica(config, runtime)
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


def _replica(config: Config, runtime: Runtime) -> Replica:
    ranks = config.rollout.engine.tensor_parallel
    if runtime.world_size % ranks:
        raise ConfigError(
            f"rollout.engine.tensor_parallel is {ranks}, which does not divide {runtime.world_size} ranks"
        )
    return make_replica(runtime, ranks)
