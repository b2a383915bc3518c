"""What the ranks do for test_two_engines: two policies, and what samples from both, kept in step by syncs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spiral_mega.distributed.runtime import Runtime
from spiral_mega.packing.distribute import distribute
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.policy import build_policies
from spiral_mega.rollout import build_engines
from spiral_mega.rollout.engine import Request, RequestKey, Sample, Sampler
from spiral_mega.rollout.sync import SyncError, Syncs, WeightSync
from tests.support.configs import make_config
from tests.support.tiny_models import END_ID

PROMPTS = [[2, 10 + i, 20 + 3 * i, *range(30, 30 + 9 * (i % 4)), 3] for i in range(4)]
ASKED = {
    "search": "search",
    "aggregation": "aggregation",
    "aggregation_2": "aggregation",
}  # component: who answers
UPDATES = 2


def lab(runtime: Runtime, argument: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case in turn; engines are closed at the end, since vLLM's take the process group along."""
    built = [one(runtime, **case) for case in argument]
    for _, engine in built:
        engine.close()
    return [results for results, _ in built]


def one(
    runtime: Runtime, folder: Path, **sections: dict[str, Any]
) -> tuple[dict[str, Any], Sampler]:
    rollout = {
        "sampling.temperature": 0.8,
        "sync.max_logprob_gap": 1e-3,
        "engine.max_num_seqs": 16,
    } | sections.pop("rollout", {})
    config = make_config(folder, rollout=rollout, optimizer={"lr": 2e-2}, **sections)
    policies, frozen = build_policies(config, runtime)
    both: dict[str, Any] = {**policies, **frozen}
    sampler, engines = build_engines(config, frozenset([END_ID]), runtime)
    syncs = {
        model: WeightSync(
            policy, engines[model], PROMPTS[0], config, runtime, frozen=model in frozen
        )
        for model, policy in both.items()
    }
    sync = Syncs(syncs)
    results: dict[str, Any] = {"gaps": [sync()], "errors": [], "samples": []}
    for update in range(UPDATES + 1):
        samples = sample(sampler)
        results["samples"].append(samples)
        results["errors"].append(
            {c: largest_error(both[model], samples, c) for c, model in ASKED.items()}
        )
        if update < UPDATES:
            sync.release()
            for model, policy in policies.items():
                rows = [s for s in samples if ASKED[s.key.component] == model]
                policy.update(distribute(sequences(rows, runtime.rank), 128, policy.replica))
            results["gaps"].append(sync())
    results["apart"] = largest_error(both["search"], results["samples"][-1], "aggregation")
    results["stale"] = stale(policies, engines, sync, results["samples"][-1], runtime)
    return results, sampler


def sample(sampler: Sampler) -> list[Sample]:
    """Of every component at once, each with seeds of its own."""
    for i, component in enumerate(ASKED):
        for j, prompt in enumerate(PROMPTS):
            sampler.add(Request(RequestKey(j, component), prompt, 2, 1000 * i + 10 * j, 8))
    samples: list[Sample] = []
    while sampler.has_unfinished():
        samples += sampler.step()
    return sorted(samples, key=lambda each: (each.key.component, each.key.episode, each.index))


def sequences(samples: list[Sample], rank: int) -> list[TrainingSequence]:
    return [
        TrainingSequence(
            SequenceKey(rank, i), PROMPTS[s.key.episode], s.token_ids, s.logprobs, (-1.0) ** i, 0.1
        )
        for i, s in enumerate(samples)
    ]


def largest_error(policy: Any, samples: list[Sample], component: str) -> float:
    """Of the log-probs that the component's samples came with, against those of `policy`."""
    rows = [s for s in samples if s.key.component == component]
    sampled = torch.tensor([p for s in rows for p in s.logprobs])
    return float((policy.logprobs(sequences(rows, 0)).cpu() - sampled).abs().max())


def stale(
    policies: Any, engines: Any, sync: Syncs, samples: list[Sample], runtime: Runtime
) -> dict[str, str]:
    """What a sync says when one model's new weights do not arrive; then a good one."""
    errors = {}
    for model, policy in policies.items():
        rows = [s for s in samples if ASKED[s.key.component] == model]
        policy.update(distribute(sequences(rows, runtime.rank), 128, policy.replica))
        name = "load_adapter" if sync.by_model[model].adapter else "load_weights"
        load = getattr(engines[model], name)
        setattr(engines[model], name, list)
        try:
            sync()
            errors[model] = ""
        except SyncError as error:
            errors[model] = str(error)
        setattr(engines[model], name, load)
        sync()
    return errors
