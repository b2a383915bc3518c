"""What the ranks do for test_engines: an engine next to a policy on megatron-core, in one process a rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.support.megatron_on_cpu import install

install()

from spiral_mega.distributed.runtime import Runtime  # noqa: E402
from spiral_mega.packing.distribute import distribute  # noqa: E402
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence  # noqa: E402
from spiral_mega.policy import build_policy  # noqa: E402
from spiral_mega.rollout import build_engine  # noqa: E402
from spiral_mega.rollout.sync import SyncError, WeightSync  # noqa: E402
from tests.policy.reference import load_model  # noqa: E402
from tests.rollout.vllm_jobs import PROMPTS, requests, response_logprobs, sample  # noqa: E402
from tests.support.configs import make_config  # noqa: E402
from tests.support.tiny_models import END_ID  # noqa: E402


def lab(
    runtime: Runtime, argument: tuple[Path, dict[str, Any], dict[str, Any], Any, Path]
) -> dict[str, Any]:
    """Gaps of the canary before and after updates, and the engine's log-probs against transformers' of the export."""
    folder, layout, rollout, lora, export = argument
    config = make_config(
        folder,
        model={"lora": lora},
        policy={"backend": "megatron", "megatron": layout},
        rollout={
            "engine.kv_cache_mb": 16,
            "engine.max_num_seqs": 16,
            "sync.max_logprob_gap": 1e-3,
            "sync.bucket_mb": 0.05,
            **rollout,
        },
        optimizer={"lr": 2e-2},
    )
    # In the trainer's order: vLLM on CPU has stand-ins for CUDA's streams too, which do less than ours.
    policy = build_policy(config, runtime)
    engine = build_engine(config, frozenset([END_ID]), runtime)
    sync = WeightSync(policy, engine, PROMPTS[0], config, runtime)
    results: dict[str, Any] = {"gaps": [sync()["sync/logprob_gap"]]}
    for seed in range(2):
        mine = _sequences(seed) if runtime.is_main else []
        policy.update(distribute(mine, 128, policy.replica))
        try:
            sync.engine = _StaleEngine(engine)
            sync()
        except SyncError as error:
            results["stale"] = str(error)
        sync.engine = engine
        results["gaps"].append(sync()["sync/logprob_gap"])
    policy.save_pretrained(export)
    saved = load_model(export)
    results["errors"] = []
    for each in sample(engine, requests()):
        expected = response_logprobs(
            saved, PROMPTS[each.key.episode], each.token_ids, config.rollout.sampling.temperature
        )
        results["errors"].append(
            max(abs(a - b) for a, b in zip(each.logprobs, expected, strict=True))
        )
    engine.close()
    return results


class _StaleEngine:
    """An engine that never receives weights."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def load_weights(self, weights: Any) -> None:
        for _ in weights:
            pass

    load_adapter = load_weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def _sequences(seed: int) -> list[TrainingSequence]:
    rng = random.Random(seed)
    return [
        TrainingSequence(
            SequenceKey(i, 0),
            prompt,
            [rng.randrange(10, 90) for _ in range(6)],
            [-4.0] * 6,
            rng.choice([-1.0, 1.0]),
            0.1,
        )
        for i, prompt in enumerate(PROMPTS)
    ]
