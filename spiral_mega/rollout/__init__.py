"""Sampling: the engine protocol and engines, the search-to-aggregation pipeline, and the batch of a step."""

from spiral_mega.config import Config
from spiral_mega.errors import ConfigError
from spiral_mega.rollout.engine import RolloutEngine, make_replica
from spiral_mega.runtime import Runtime

__all__ = ["RolloutEngine", "build_engine"]


def build_engine(config: Config, stop_ids: frozenset[int], runtime: Runtime) -> RolloutEngine:
    """The engine that `rollout.engine` names, without weights: the policy's are loaded into it. Collective."""
    ranks = config.rollout.tensor_parallel
    if runtime.world_size % ranks:
        raise ConfigError(f"rollout.tensor_parallel is {ranks}, which does not divide {runtime.world_size} ranks")
    replica = make_replica(runtime, ranks)
    if config.rollout.engine == "vllm":
        from spiral_mega.rollout.vllm_engine import VllmEngine

        return VllmEngine(config, stop_ids, runtime, replica)
    from spiral_mega.rollout.transformers_engine import TransformersEngine, empty_model

    return TransformersEngine(
        empty_model(config, runtime),
        temperature=config.rollout.temperature,
        stop_ids=stop_ids,
        max_batch=config.rollout.max_batch,
        replica=replica,
    )
