"""Inputs of the simulation: a step's problems with the lengths of their traces, and the speed of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from spiral_mega.algorithm.sets import SetDesign, sample_sets


@dataclass(frozen=True, slots=True)
class Shape:
    """Counts of a rollout step; defaults are the paper's. `max_tokens` bounds a response."""

    problems: int = 256
    search_traces: int = 8
    num_sets: int = 4
    set_size: int = 4
    aggregation_traces: int = 4
    max_tokens: int = 4096
    set_design: SetDesign = "uniform"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Response lengths in tokens: median * exp(problem_sigma * z_problem + trace_sigma * z_trace),
    truncated at max_tokens.

    Traces of one problem share z_problem. Truncated ones form a point mass at max_tokens (9 % at
    the defaults). Prompts are uniform between `prompt_low` and `prompt_high` tokens.
    """

    median: float = 1600.0
    problem_sigma: float = 0.5
    trace_sigma: float = 0.5
    prompt_low: int = 200
    prompt_high: int = 1024


@dataclass(frozen=True, slots=True)
class SimProblem:
    """Lengths of one problem in tokens: prompt, N1 search traces, K sets of them, N2 answers to each set."""

    prompt: int
    search: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]
    aggregation: tuple[tuple[int, ...], ...]

    def set_tokens(self, set_index: int) -> list[int]:
        """Return the lengths of a set's prompt parts in order: the problem, then each member trace."""
        return [self.prompt, *(self.search[j] for j in self.sets[set_index])]

    def lengths(self) -> Iterator[int]:
        yield from self.search
        for answers in self.aggregation:
            yield from answers


def prompt_parts(index: int, problem: SimProblem, set_index: int | None) -> list[tuple[Any, int]]:
    """Return a trace's prompt as (name, tokens) parts: the problem alone, or a set's. A name identifies a prefix."""
    if set_index is None:
        return [((index, "search"), problem.prompt)]
    members = problem.sets[set_index]
    tokens = problem.set_tokens(set_index)
    return [((index, *members[:k]), tokens[k]) for k in range(len(tokens))]


def sample_problems(shape: Shape, lengths: Lengths, seed: int, extra: int = 0) -> list[SimProblem]:
    """Sample `shape.problems + extra` problems. The same seed gives the same first ones for any `extra`."""
    rng = np.random.default_rng(seed)
    return [_sample_problem(shape, lengths, rng) for _ in range(shape.problems + extra)]


def _sample_problem(shape: Shape, lengths: Lengths, rng: np.random.Generator) -> SimProblem:
    shared = np.log(lengths.median) + lengths.problem_sigma * rng.standard_normal()

    def draw(count: int) -> tuple[int, ...]:
        raw = np.exp(shared + lengths.trace_sigma * rng.standard_normal(count))
        return tuple(int(x) for x in np.clip(np.ceil(raw), 1, shape.max_tokens))

    prompt = int(rng.integers(lengths.prompt_low, lengths.prompt_high + 1))
    search = draw(shape.search_traces)
    sets: list[tuple[int, ...]] = []
    if shape.num_sets:  # GRPO has none
        sets = sample_sets(
            shape.search_traces, shape.set_size, shape.num_sets, rng=rng, method=shape.set_design
        )
    aggregation = tuple(draw(shape.aggregation_traces) for _ in sets)
    return SimProblem(prompt, search, tuple(sets), aggregation)


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data-sheet peaks and the shares of them that kernels reach. Bytes, bytes/s, FLOP/s, seconds."""

    memory: float = 80e9  # H100 SXM
    bandwidth: float = 3.35e12
    flops: float = 989e12  # bf16, dense
    memory_share: float = 0.9  # vLLM's gpu_memory_utilization
    bandwidth_share: float = 0.8
    flops_share: float = 0.6
    step_overhead: float = 1e-3  # scheduler, sampler and launches, per step
    all_reduce: float = 10e-6  # one small all-reduce over NVLink


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A dense decoder in bf16. `params` are those read for a token; input embeddings count only if they are tied."""

    name: str
    params: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


QWEN3_4B = LanguageModel(
    "Qwen3-4B", params=4.02e9, layers=36, heads=32, kv_heads=8, head_dim=128
)  # tied
QWEN3_8B = LanguageModel(
    "Qwen3-8B", params=8.19e9 - 151936 * 4096, layers=36, heads=32, kv_heads=8, head_dim=128
)


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Time of one engine step in seconds, with B sequences decoding, K tokens of context read, and
    prefill:

        step + sequence * B + kv * K + (prefill * tokens + pair * attended pairs of those tokens)

    `chunk` tokens are prefilled in a step. `capacity` bounds the tokens in the KV cache,
    `max_sequences` bounds B.
    """

    step: float
    sequence: float
    kv: float
    prefill: float
    pair: float
    capacity: float
    chunk: float = 8192.0
    max_sequences: int = 256

    def decode(self, context: float, tokens: float) -> float:
        """Return the engine time of decoding `tokens` tokens after `context`, without the fixed time per step."""
        return self.sequence * tokens + self.kv * tokens * (context + tokens / 2)

    def prefill_time(self, start: float, tokens: float) -> float:
        """Return the engine time of prefilling `tokens` after `start` cached ones, without the fixed time per step."""
        return self.prefill * tokens + self.pair * tokens * (start + tokens / 2)

    def latency(self, start: float, prefill: float, tokens: float) -> float:
        """Return the time from submission to the last token, alone on an engine that has `start` tokens of prefix."""
        steps = prefill / self.chunk + tokens
        return (
            self.step * steps
            + self.prefill_time(start, prefill)
            + self.decode(start + prefill, tokens)
        )


def engine_model(
    model: LanguageModel, gpu: Gpu | None = None, tensor_parallel: int = 1
) -> EngineModel:
    """Derive the constants of an engine on `tensor_parallel` GPUs from FLOPs and bytes.

    A step reads every weight once; a token costs 2 FLOPs per parameter; its attention reads all
    earlier keys and values, once per sequence (no kernel that reads a shared prefix once is
    assumed); prefill costs the same 2 FLOPs per parameter and 4 * layers * heads * head_dim FLOPs
    per (query, key) pair. The sum is conservative: a real step overlaps part of the arithmetic with
    reading weights.
    """
    gpu = gpu or Gpu()
    bandwidth = gpu.bandwidth * gpu.bandwidth_share * tensor_parallel
    flops = gpu.flops * gpu.flops_share * tensor_parallel
    reduces = 2 * model.layers * gpu.all_reduce if tensor_parallel > 1 else 0.0
    weights = 2 * model.params
    capacity = (
        gpu.memory * gpu.memory_share * tensor_parallel - weights - 4e9
    ) / model.kv_bytes  # 4 GB: activations
    return EngineModel(
        step=weights / bandwidth + gpu.step_overhead + reduces,
        sequence=2 * model.params / flops,
        kv=model.kv_bytes / bandwidth,
        prefill=2 * model.params / flops,
        pair=4 * model.layers * model.heads * model.head_dim / flops,
        capacity=capacity,
    )
