"""How long a weight sync takes: gathering, merging and handing over, against copying the same bytes once in memory.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.weight_sync --lora 32

A random model of SmolLM2-135M's shape, sharded by FSDP2. The engine's own loading is left out: what
is timed is the policy's part, to the moment at which every whole tensor was in hand. Also timed:
the same with a reader that copies each tensor into memory of its own, as an engine does. Memory is
that of the first sync with such a reader: the peak over what was resident before, and what stays."""

from __future__ import annotations

import gc
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import psutil
import torch
import torch.distributed as dist
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from spiral_mega.config import Config
from spiral_mega.distributed.collectives import gather_objects, max_over_ranks
from spiral_mega.distributed.runtime import start_runtime
from spiral_mega.models.weights import weight_shapes
from spiral_mega.policy import Policy, build_policy
from spiral_mega.process.exit import skip_teardown

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def main(
    bucket_mb: Annotated[float, typer.Option(help="rollout.sync.bucket_mb")] = 128,
    lora: Annotated[int, typer.Option(help="rank of adapters to merge; 0: none")] = 0,
    turns: Annotated[int, typer.Option(help="figures are medians of so many")] = 7,
) -> None:
    """Time the policy's part of a weight sync."""
    with start_runtime() as runtime, tempfile.TemporaryDirectory() as own:
        folder = gather_objects(own)[0]
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
        dist.barrier()
        policy = build_policy(_config(folder, bucket_mb, lora), runtime)
        sizes = {name: math.prod(shape) * 4 for name, shape in weight_shapes(folder).items()}
        total = sum(sizes.values())
        source, target = torch.ones(total // 4), torch.zeros(total // 4)
        ways: dict[str, Callable[[], Any]] = {
            "copy": lambda: target.copy_(source),
            "sync": lambda: _take(policy),
            "read": lambda: _take(policy, target),
        }
        peak, kept = _memory(ways["read"])
        memory = max_over_ranks({"peak": peak, "kept": kept})
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(turns + 1):
            for name, way in ways.items():
                dist.barrier()
                started = time.perf_counter()
                way()
                spent = max_over_ranks({name: time.perf_counter() - started})[name]
                if turn:  # the first warms up
                    times[name].append(spent)
        if runtime.is_main:
            largest = max(sizes.values()) / 2**20
            ratios = [s / c for s, c in zip(times["sync"], times["copy"], strict=True)]
            print(
                f"{runtime.world_size} ranks, {total / 2**20:.0f} MiB in {len(sizes)} tensors (largest {largest:.0f}), "
                f"LoRA rank {lora}, bucket {bucket_mb:g} MiB; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
            )
            print(
                f"copy in memory {median(times['copy']):.3f} s, gather and merge {median(times['sync']):.3f} s"
            )
            print(
                f"sync / copy: median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
            )
            print(f"with a reader that copies: {median(times['read']):.3f} s")
            buckets = memory["peak"] / max(bucket_mb, largest)
            print(
                f"memory at the peak {memory['peak']:.0f} MiB, {buckets:.2f} buckets; kept {memory['kept']:.0f} MiB"
            )


def _config(folder: str, bucket_mb: float, lora: int) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "unused", "steps": 1},
            "model": {"path": folder, "lora": {"rank": lora} if lora else None},
            "data": {"train": [{"path": "unused.jsonl"}]},
            "rollout": {
                "sampling": {"max_response_tokens": 64, "max_context_tokens": 2048},
                "sync": {"bucket_mb": bucket_mb},
            },
        }
    )


def _take(policy: Policy, target: torch.Tensor | None = None) -> None:
    """Take every tensor, copy it into `target`, and let it go."""
    place = 0
    for _, tensor in policy.weights(torch.float32):
        if target is not None:
            target[place : place + tensor.numel()].view(tensor.shape).copy_(tensor)
            place += tensor.numel()
        del tensor


def _memory(way: Callable[[], Any]) -> tuple[float, float]:
    """MiB that `way` adds to the resident memory, sampled every millisecond: at the most, and for good."""
    gc.collect()
    process = psutil.Process()
    before, peak, done = process.memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    way()
    done.set()
    watcher.join()
    return (peak - before) / 2**20, (process.memory_info().rss - before) / 2**20


if __name__ == "__main__":
    with skip_teardown():
        typer.run(main)
