"""Sampling: the engine protocol and engines, the search-to-aggregation pipeline, and the batch of a step."""

from spiral_mega.config import Config
from spiral_mega.rollout.engine import RolloutEngine
from spiral_mega.runtime import Runtime

__all__ = ["RolloutEngine", "build_engine"]


def build_engine(config: Config, stop_ids: frozenset[int], runtime: Runtime) -> RolloutEngine:
    """The engine that `rollout.engine` names, without weights: the policy's are loaded into it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from spiral_mega.rollout.transformers_engine import TransformersEngine

    hf_config = AutoConfig.from_pretrained(config.model.path)
    # Training may move a tied head apart from the embedding (LoRA on the unembedding), so the engine's is its own.
    hf_config.tie_word_embeddings = False
    with torch.device(runtime.device):
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=getattr(torch, config.policy.param_dtype), attn_implementation="sdpa"
        )
    return TransformersEngine(
        model, temperature=config.rollout.temperature, stop_ids=stop_ids, max_batch=config.rollout.max_batch
    )
