"""Rollouts: engines, pipeline, batches, and the sync of weights.

batch.py            a step's batch: enough effective prompts (dynamic sampling)
pipeline.py         episodes for many problems over all ranks; public entry
scheduler.py        one rank: what its engine samples next
exchange.py         between ranks: status, routing of sets, messages
episode_builder.py  one episode: samples in, requests out
engine.py           the engine protocol: transformers_engine.py, vllm_engine.py, two_engines.py
sync.py             the policy's weights into the engine, and the check that they arrived
recording.py        batches on disk, to train on again without an engine
"""

from spiral_mega.rollout.build import build_engine, build_engines
from spiral_mega.rollout.engine import RolloutEngine, Sampler

__all__ = ["RolloutEngine", "Sampler", "build_engine", "build_engines"]
