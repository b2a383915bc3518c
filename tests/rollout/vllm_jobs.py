"""What the ranks do for test_vllm_engine: a real vLLM engine beside a real FSDP2 policy, in one process a rank."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from spiral_mega.distributed.runtime import Runtime
from spiral_mega.packing.distribute import distribute
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.policy import build_policy
from spiral_mega.policy.fsdp import fsdp_policy
from spiral_mega.rollout import build_engine
from spiral_mega.rollout.engine import Request, RequestKey, RolloutEngine, Sample
from spiral_mega.rollout.sync import SyncError, WeightSync
from spiral_mega.traces import SEARCH
from tests.support.configs import make_config
from tests.support.tiny_models import END_ID

WITH_ARGUMENTS = ("sleep", "wake", "rpc")  # calls of which the arguments matter
UPDATES = 3
ROUNDS = 20
STOPS = frozenset([END_ID, *range(60, 75)])  # several, so that some responses stop early
PROMPTS = [[2, 10 + i, 20 + 3 * i, *range(30, 30 + 9 * (i % 4)), 3] for i in range(6)]


def lab(
    runtime: Runtime, argument: tuple[Path, dict[str, Any] | None, dict[str, Any]]
) -> dict[str, Any]:
    """Everything that is measured on one set of ranks with one model: its folder, model.lora, and keys of rollout."""
    folder, lora, rollout = argument
    config = make_config(
        folder,
        model={"lora": lora},
        rollout={
            "engine.name": "vllm",
            "engine.kv_cache_mb": 16,
            "engine.max_num_seqs": 16,
            "sampling.temperature": 0.8,
            "sync.max_logprob_gap": 1e-3,
            **rollout,
        },
        optimizer={"lr": 2e-2, "offload": True},
    )
    before = process_state()
    engine = build_engine(config, STOPS, runtime)
    after = process_state()
    policy = build_policy(config, runtime)
    sync = WeightSync(policy, engine, PROMPTS[0], config, runtime)
    results: dict[str, Any] = {
        "before": before,
        "after": after,
        "gaps": [sync()["sync/logprob_gap"]],
    }
    results["samples"] = samples = sample(engine, requests())
    results["reference"] = teacher_forced(folder, samples, config.rollout.sampling.temperature)
    results["alone"] = [sample(engine, [each])[0] for each in requests()[:3]]
    results["shifted"] = sample(
        engine, [Request(RequestKey(0, SEARCH), PROMPTS[0], 1, 1000 + 2, 8)]
    )
    results["late"] = sample(engine, requests()[:3], late=requests()[3:])
    results["aborted"] = aborted(engine)
    results["errors"], results["moved"] = [], []
    for update in range(UPDATES):
        sync.release()
        policy.update(
            distribute(training_sequences(samples, update, runtime, engine), 128, policy.replica)
        )
        results["gaps"].append(sync()["sync/logprob_gap"])
        moved = sample(engine, requests())
        results["errors"].append(largest_error(policy, moved, runtime))
        results["moved"].append(
            max(abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(samples, moved, strict=True))
        )
    results["stale"] = stale_sync(policy, engine, sync, samples, runtime)
    results["calls"] = life_cycle(policy, engine, sync, samples, runtime)
    if (
        runtime.world_size <= 2
    ):  # ranks that wait for each other in a loop take minutes where cores are fewer
        results["growth"] = growth(sync, engine)
    engine.close()
    results["group_left"] = dist.is_initialized()
    return results


def requests() -> list[Request]:
    return [
        Request(RequestKey(i, SEARCH), prompt, 3, 1000 * (i + 1), 8)
        for i, prompt in enumerate(PROMPTS)
    ]


def sample(
    engine: RolloutEngine, first: list[Request], late: list[Request] | None = None
) -> list[Sample]:
    """The samples in order of request; `late` requests join after two steps."""
    samples: list[Sample] = []
    for request in first:
        engine.add(request)
    for step in range(1000):
        if step == 2:
            for request in late or []:
                engine.add(request)
        if step >= 2 and not engine.has_unfinished():
            break
        samples += engine.step() if engine.has_unfinished() else []
    return sorted(samples, key=lambda each: (each.key, each.index))


def aborted(engine: RolloutEngine) -> dict[str, Any]:
    """Three requests of which two are aborted after two steps; then one of those again."""
    for request in requests()[:3]:
        engine.add(request)
    early = [*engine.step(), *engine.step()]
    engine.abort([RequestKey(0, SEARCH), RequestKey(2, SEARCH)])
    rest = sample(engine, [])
    return {"early": early, "rest": rest, "again": sample(engine, requests()[:1])}


def teacher_forced(folder: Path, samples: list[Sample], temperature: float) -> list[list[float]]:
    """Log-probs by plain transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [
        response_logprobs(model, PROMPTS[each.key.episode], each.token_ids, temperature)
        for each in samples
    ]


@torch.no_grad()
def response_logprobs(
    model: Any, prompt: list[int], response: list[int], temperature: float
) -> list[float]:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    chosen = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])
    return chosen[:, 0].tolist()


def training_sequences(
    samples: list[Sample], update: int, runtime: Runtime, engine: RolloutEngine
) -> list[TrainingSequence]:
    """Some of the samples with advantages that pull the weights about; each rank of its own."""
    return [
        TrainingSequence(
            SequenceKey(runtime.rank, i),
            PROMPTS[each.key.episode],
            each.token_ids,
            each.logprobs,
            (-1.0) ** (i + update),
            0.1,
        )
        for i, each in enumerate(samples[update : update + 6])
    ]


def largest_error(policy: Any, samples: list[Sample], runtime: Runtime) -> float:
    """The engine's log-probs against the policy's, on all of `samples`."""
    worst = 0.0
    for each in samples:
        canary = TrainingSequence(
            SequenceKey(0, 0), PROMPTS[each.key.episode], each.token_ids, each.logprobs, 0.0, 0.0
        )
        worst = max(
            worst, float((policy.logprobs([canary]) - torch.tensor(each.logprobs)).abs().max())
        )
    return worst


def stale_sync(
    policy: Any, engine: Any, sync: WeightSync, samples: list[Sample], runtime: Runtime
) -> dict[str, str]:
    """What a sync says that brings nothing, and one that brings all but the head's part; then a good one."""
    name = "load_adapter" if sync.adapter else "load_weights"
    load, errors = getattr(engine, name), {}
    policy.update(distribute(training_sequences(samples, 3, runtime, engine), 128, policy.replica))

    def partial(weights):
        return load((n, torch.zeros_like(w) if "lm_head" in n else w) for n, w in weights)

    for kind, broken in (("stale", list), ("partial", partial)):
        setattr(engine, name, broken)
        try:
            sync()
            errors[kind] = ""
        except SyncError as error:
            errors[kind] = str(error)
    setattr(engine, name, load)
    sync()
    return errors


def life_cycle(
    policy: Any, engine: Any, sync: Any, samples: list[Sample], runtime: Runtime
) -> list[str]:
    """What is done to the device's memory from the end of sampling to the next sample, in order."""
    calls: list[str] = []

    def spy(owner: Any, name: str, label: str) -> Any:
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(
                " ".join(
                    [
                        label,
                        *map(str, [*args[:1], *kwargs.values()] if label in WITH_ARGUMENTS else []),
                    ]
                )
            )
            return plain(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    class Cache:
        def empty_cache(self) -> None:
            calls.append("empty cache")

    plain_runtime, sync.runtime = sync.runtime, Cache()
    with (
        spy(engine._llm, "sleep", "sleep"),
        spy(engine._llm, "wake_up", "wake"),
        spy(engine._llm, "collective_rpc", "rpc"),
        spy(engine._engine, "add_lora", "add adapter"),
        spy(engine._engine, "reset_prefix_cache", "reset prefix cache"),
        spy(engine._engine, "add_request", "sample"),
        spy(fsdp_policy, "move_moments", "moments"),
        spy(policy.optimizer, "step", "optimizer"),
    ):
        sync.release()
        policy.update(
            distribute(training_sequences(samples, 4, runtime, engine), 128, policy.replica)
        )
        sync()
    sync.runtime = plain_runtime
    return calls


def growth(sync: WeightSync, engine: RolloutEngine) -> dict[str, float]:
    """MiB and open files that ROUNDS rounds of syncing and sampling add, after as many to warm up."""
    process = psutil.Process()
    sizes = []
    for _ in range(2):
        for _ in range(ROUNDS):
            sync()
            sample(engine, requests())
        sizes.append((process.memory_info().rss / 2**20, process.num_fds()))
    return {"mib": sizes[1][0] - sizes[0][0], "files": sizes[1][1] - sizes[0][1]}


def process_state() -> dict[str, Any]:
    """What an engine must leave as it was: launcher's variables, random states, threads, names of shared memory."""
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    settable = torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    return {
        "environment": {name: os.environ.get(name) for name in names},
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "threads": threads,
        "settable": settable,
        # Python's own (psm_...) is watched by a process of its own, which takes the name off whatever happens.
        "named memory": [
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/dev/shm/" in line and "/psm_" not in line and not line.endswith("(deleted)")
        ],
    }
