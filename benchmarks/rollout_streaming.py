"""Compare streaming with a barrier on real vLLM engines: the same episodes by the pipeline and in two phases.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.rollout_streaming

Uses a random model of a few layers. Its responses end at random after about 280 tokens (the vocabulary) on average:
geometric lengths, with the long tail of real traces. Both ways sample the same traces (checked); they alternate, and
the figures are medians over the turns.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from spiral_mega.config import Config
from spiral_mega.distributed.collectives import gather_objects, max_over_ranks, sum_over_ranks
from spiral_mega.distributed.runtime import Runtime, start_runtime
from spiral_mega.models.tokenizer import load_tokenizer
from spiral_mega.models.weights import pretrained_weights
from spiral_mega.process.exit import skip_teardown
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards import VerifierPool
from spiral_mega.rollout import build_engine
from spiral_mega.rollout.engine import RolloutEngine, Sample
from spiral_mega.rollout.episode_builder import EpisodeBuilder, Task
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.traces import Episode, Problem

TOKENIZER = "configs/demo/model"
Episodes = list[Episode]


def main(
    problems: Annotated[int, typer.Option(help="problems of a step, over all ranks")] = 8,
    longest: Annotated[int, typer.Option(help="tokens at which a response is truncated")] = 2048,
    turns: Annotated[int, typer.Option(help="runs of each way; figures are their medians")] = 5,
) -> None:
    """Time a SPIRAL rollout step, with and without a barrier between search and aggregation."""
    with start_runtime() as runtime, tempfile.TemporaryDirectory() as folder:
        config = _config(Path(gather_objects(folder)[0]), longest)
        tokenizer = load_tokenizer(config.model)
        engine = build_engine(config, frozenset([tokenizer.eos_token_id]), runtime)
        prompter = Prompter(config.prompts, tokenizer)
        with VerifierPool(5.0, 1, ("exact",)) as verifier:
            pipeline = Pipeline(
                engine, prompter, verifier, tokenizer, config.algorithm, config.rollout
            )
            tasks = [_task(i) for i in range(problems)]
            ways: dict[str, Callable[[], Episodes]] = {
                "barrier": lambda: in_two_phases(pipeline, tasks),
                "streaming": lambda: pipeline.run(tasks),
            }
            found = {
                name: timed(way, engine, config.model.path) for name, way in ways.items()
            }  # also the warm-up
            same = tokens(found["barrier"][0]) == tokens(found["streaming"][0])
            times: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in ways}
            for turn in range(turns):
                for name in sorted(ways, reverse=bool(turn % 2)):
                    times[name].append(timed(ways[name], engine, config.model.path)[1])
            report(runtime, found["streaming"][0], times, same)
        engine.close()


def in_two_phases(pipeline: Pipeline, tasks: list[Task]) -> Episodes:
    """All search traces on all ranks, and then all aggregation traces, each set on the engine of its problem."""
    engine = pipeline.engine
    builders = {
        index: EpisodeBuilder(pipeline.context, index, task, verify_rewards=True)
        for index, task in enumerate(tasks)
        if index % engine.replica.count == engine.replica.index
    }
    requests = [builder.first_request() for builder in builders.values()]
    for _ in ("search", "aggregation"):
        for request in requests:
            engine.add(request)
        requests = []
        while engine.has_unfinished():
            for sample in engine.step():
                requests += builders[sample.key.episode].add_sample(sample)
        dist.barrier()
    return [builder.build() for builder in builders.values()]


def timed(
    way: Callable[[], Episodes], engine: RolloutEngine, folder: str
) -> tuple[Episodes, np.ndarray[Any, Any]]:
    """What `way` gives from an empty prefix cache; wall-clock time, CPU-seconds of all ranks, and the largest number of
    steps that an engine took, which is what counts where a step costs the same whatever the batch."""
    engine.load_weights(pretrained_weights(folder))  # which empties the cache
    taken, plain = 0, type(engine).step

    def step() -> list[Sample]:
        nonlocal taken
        taken += 1
        return plain(engine)

    engine.step = step  # type: ignore[method-assign]
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    episodes = way()
    cpu = time.process_time() - cpu
    spent = max_over_ranks({"wall": time.perf_counter() - wall, "steps": taken})
    return episodes, np.array([spent["wall"], sum_over_ranks({"cpu": cpu})["cpu"], spent["steps"]])


def tokens(episodes: Episodes) -> list[list[int]]:
    return [trace.response_ids for episode in episodes for trace in episode.traces()]


def report(
    runtime: Runtime, episodes: Episodes, times: dict[str, list[np.ndarray[Any, Any]]], same: bool
) -> None:
    traces = [trace for episode in episodes for trace in episode.traces()]
    totals = sum_over_ranks(
        {
            "traces": len(traces),
            "response": sum(trace.length for trace in traces),
            "prompt": sum(len(trace.prompt_ids) for trace in traces),
            "cached": sum(trace.cached_tokens for trace in traces),
        }
    )
    same = all(gather_objects(same))
    if not runtime.is_main:
        return
    medians = {name: np.median(np.array(each), axis=0) for name, each in times.items()}
    print(f"{runtime.world_size} ranks, {totals['traces']:.0f} traces of {totals['response']:.0f} tokens; "
          f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; the same traces both ways: {same}")  # fmt: skip
    print(
        f"prompts: {totals['prompt']:.0f} tokens, {totals['cached'] / totals['prompt']:.1%} from the prefix cache"
    )
    for name, (wall, cpu, steps) in medians.items():
        print(
            f"{name:10} {wall:7.2f} s wall {cpu:7.2f} CPU-s {steps:6.0f} steps of the busiest engine"
        )
    ratios = [b[0] / s[0] for b, s in zip(times["barrier"], times["streaming"], strict=True)]
    print(
        f"barrier / streaming, wall: median {median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
    )


def _config(folder: Path, longest: int) -> Config:
    """The paper's shape on a random model with the demo's tokenizer, a token a word; of its vocabulary a quarter has
    words, so that a trace is four times as long as it reads."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4 * len(tokenizer),
        "tie_word_embeddings": False,
    }
    model = Qwen3ForCausalLM(
        Qwen3Config(**shape, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    )
    model.save_pretrained(folder)  # on the first rank: transformers writes on no other
    tokenizer.save_pretrained(folder)
    dist.barrier()
    return Config.model_validate(
        {
            "run": {"dir": "unused", "steps": 1},
            "model": {"path": str(folder)},
            "data": {"train": [{"path": "unused.jsonl"}], "max_prompt_tokens": 16},
            "prompts": {
                "aggregation": "{problem} {traces}",
                "trace": "| {trace}",
                "unfinished": "| {trace}",
            },
            "rollout": {
                "engine": {"name": "vllm", "kv_cache_mb": 512, "max_num_seqs": 256},
                "sampling": {
                    "max_response_tokens": longest,
                    "max_context_tokens": 32 + 6 * longest,
                },
            },
        }
    )


def _task(index: int) -> Task:
    problem = Problem(
        f"p{index}", ({"role": "user", "content": f"{index} {index + 1}"},), ("1",), "exact"
    )
    return Task(problem, 0, (0, 0, problem.id))


if __name__ == "__main__":
    with skip_teardown():
        typer.run(main)
