"""FsdpPolicy on micro-batches of at most 16,384 distinct tokens, as the trainer drives it."""

from __future__ import annotations

import time

from spiral_mega.config import Config
from spiral_mega.distributed.runtime import start_runtime
from spiral_mega.packing.distribute import distribute
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.policy import build_policy

from .batch import BUDGET, CLIP, RESPONSE, SAMPLER_LOGPROB, Item, batch


def update(folder: str, problems: int) -> dict[str, float]:
    config = Config.model_validate(
        {
            "run": {"dir": f"{folder}/run", "steps": 2},
            "model": {"path": folder},
            "data": {"train": [{"path": "unused.jsonl"}]},
            "rollout": {"sampling": {"max_response_tokens": RESPONSE, "max_context_tokens": 1024}},
            "algorithm": {"loss": {"name": "ppo_clip", "clip_low": CLIP, "clip_high": CLIP}},
            "policy": {"microbatch_tokens": BUDGET},
        }
    )
    with start_runtime() as runtime:
        policy = build_policy(config, runtime)
        policy.update(distribute(_sequences(batch(1, response=2)), BUDGET, policy.replica))
        learnt = _sequences(batch(problems))
        start = time.process_time()
        metrics = policy.update(distribute(learnt, BUDGET, policy.replica))
        return {"cpu": time.process_time() - start, "loss": metrics["train/loss"]}


def _sequences(items: list[Item]) -> list[TrainingSequence]:
    tokens = sum(len(item.response) for item in items)
    return [
        TrainingSequence(
            SequenceKey(item.problem, i),
            item.prompt,
            item.response,
            [SAMPLER_LOGPROB] * len(item.response),
            item.advantage,
            weight=1 / tokens,
        )
        for i, item in enumerate(items)
    ]
