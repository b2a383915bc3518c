"""Tokens, time and memory of a training step on one problem: padded, packed flat, and packed as a token tree.

    python -m benchmarks.token_trees                              # the paper's shape, traces of 256 tokens
    python -m benchmarks.token_trees --shortest 128               # traces of 128 to 256 tokens
    python -m benchmarks.token_trees --shape grpo --prompt 512    # 16 responses to one prompt
    python -m benchmarks.token_trees --build                      # trees of 256 problems at the paper's full lengths

Forward and backward of a Qwen3 of 12.2 M parameters with the policy's fused head, float32, micro-batches of at most
`--budget` tokens. One thread: CPU time leaves out what others take of a busy machine, and wall time stands beside it.
Every run is a process of its own, and a round runs each contender once, so that a drift of the machine's speed meets
them all.

- `padded`: prompts padded on the left to the longest one of the batch, responses on the right to the longest one, with
  the attention mask that says so, in random order: what TRL 1.16's GRPOTrainer hands its model. Like the others it has
  the fused head and gives it the real response tokens only, as TRL does on a GPU.
- `bare`: the least that padding can cost. Sequences padded on the right, where causality hides it without a mask, so
  that attention is causal and skips half of the pairs.
- `flat`: a forest of one tree a sequence. verl 0.9 (`use_remove_padding`) packs so by default.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from transformers import Qwen3Config, Qwen3ForCausalLM

import spiral_mega.packing.attention  # noqa: F401  (registers tree_torch)
from spiral_mega.kernels import linear_logprob
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree import build_tree
from spiral_mega.packing.tree_batch import pack
from spiral_mega.packing.tree_parts import cut_tree, make_branches

# The head's share of a row's products, 9.7 %, is that of Qwen3-4B (2,560 x 151,936 beside 3.63 G); Qwen3-8B's is 8.2 %.
VOCAB = 3072
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
CONTENDERS = ("padded", "bare", "flat", "tree")


def spiral_problem(
    prompt: int, shortest: int, longest: int, *, draw: int = 0, vocab: int = VOCAB
) -> list[TrainingSequence]:
    """N1 = 8 search traces, K = 4 sets of n = 4 of them in ascending order, N2 = 4 aggregation traces each."""
    rng = random.Random(draw)
    sets = [sorted(rng.sample(range(8), 4)) for _ in range(4)]
    text = lambda length: [rng.randrange(vocab) for _ in range(length)]  # noqa: E731
    start = text(prompt)
    traces = [text(rng.randint(shortest, longest)) for _ in range(8)]
    pairs = [(start, trace) for trace in traces]
    header = text(8)
    for members in sets:
        context = [*start, *header, *(token for i in members for token in traces[i])]
        pairs += [(list(context), text(rng.randint(shortest, longest))) for _ in range(4)]
    return [_sequence(draw, i, *pair) for i, pair in enumerate(pairs)]


def grpo_problem(prompt: int, shortest: int, longest: int) -> list[TrainingSequence]:
    """16 responses to one prompt."""
    rng = random.Random(0)
    text = lambda length: [rng.randrange(VOCAB) for _ in range(length)]  # noqa: E731
    start = text(prompt)
    return [_sequence(0, i, start, text(rng.randint(shortest, longest))) for i in range(16)]


def _sequence(draw: int, index: int, prompt: list[int], response: list[int]) -> TrainingSequence:
    advantage = 1.0 - 2.0 * (index % 2)
    return TrainingSequence(
        SequenceKey(draw, index), prompt, response, [-9.0] * len(response), advantage, 1e-3
    )


def micro_batches(
    sequences: list[TrainingSequence], budget: int
) -> Iterator[list[TrainingSequence]]:
    """The parts of each draw's tree, as many in a micro-batch as fit, in order."""
    batch: list[TrainingSequence] = []
    room = budget
    for draw in sorted({s.key.prompt_index for s in sequences}):
        members = [s for s in sequences if s.key.prompt_index == draw]
        for part in cut_tree(make_branches(members), budget):
            if part.tokens > room:
                yield batch
                batch, room = [], budget
            batch += [s for s in members if s.key in part.keys]
            room -= part.tokens
    yield batch


def run_packed(model: Any, sequences: list[TrainingSequence], budget: int) -> tuple[int, float]:
    tokens, total = 0, 0.0
    for members in micro_batches(sequences, budget):
        batch = pack(members)
        hidden = model.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            **batch.attention_kwargs(),
        ).last_hidden_state[0, batch.logit_indices]
        logprobs = linear_logprob(hidden, model.lm_head.weight, batch.labels).logprob[
            batch.gather_indices
        ]
        total += _learn(logprobs, batch.sampler_logprobs, batch.advantages, batch.weights)
        tokens += batch.input_ids.numel()
    return tokens, total


def run_padded(
    model: Any, sequences: list[TrainingSequence], budget: int, *, bare: bool = False
) -> tuple[int, float]:
    """Every prompt ends at the same column, or, if `bare`, every sequence begins at the first."""
    prompt = max(len(s.prompt_ids) for s in sequences)
    width = max(s.num_tokens if bare else prompt + len(s.response_ids) for s in sequences)
    at_once = max(1, budget // width)
    total = 0.0
    order = random.Random(0).sample(sequences, len(sequences))
    for first in range(0, len(sequences), at_once):
        members = order[first : first + at_once]
        ids = torch.zeros(len(members), width, dtype=torch.long)
        real, learnt = (torch.zeros(len(members), width, dtype=torch.bool) for _ in range(2))
        for row, s in enumerate(members):
            start = 0 if bare else prompt - len(s.prompt_ids)
            stop, answer = start + s.num_tokens, start + len(s.prompt_ids)
            ids[row, start:stop] = torch.tensor([*s.prompt_ids, *s.response_ids])
            real[row, start:stop] = True
            learnt[row, answer - 1 : stop - 1] = True
        mask = None if bare else real.long()
        hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[
            learnt
        ]
        targets = torch.tensor([token for s in members for token in s.response_ids])
        counts = torch.tensor([len(s.response_ids) for s in members])
        each = [torch.tensor(values).repeat_interleave(counts) for values in
                ([-9.0] * len(members), [s.advantage for s in members], [s.weight for s in members])]  # fmt: skip
        total += _learn(linear_logprob(hidden, model.lm_head.weight, targets).logprob, *each)
    return len(sequences) * width, total


def _learn(
    logprobs: torch.Tensor, sampler: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor
) -> float:
    loss = -(weights * advantages * (logprobs - sampler).exp()).sum()
    torch.autograd.backward(loss)
    return loss.item()


def measure(name: str, sequences: list[TrainingSequence], budget: int) -> dict[str, float]:
    """One step after a warm-up on two short sequences: wall and CPU s, MiB above the idle process, tokens, loss,
    |gradient|."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    padded = name in ("padded", "bare")
    model = Qwen3ForCausalLM(
        Qwen3Config(**MODEL, attn_implementation="sdpa" if padded else "tree_torch")
    )
    run = partial(run_padded, bare=name == "bare") if padded else run_packed
    if name == "flat":
        sequences = [replace(s, key=SequenceKey(i, 0)) for i, s in enumerate(sequences)]
    run(
        model,
        [
            replace(s, prompt_ids=[1, 2], response_ids=[3], sampler_logprobs=[-9.0])
            for s in sequences[:2]
        ],
        budget,
    )
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu_start = time.perf_counter(), time.process_time()
    tokens, loss = run(model, sequences, budget)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    norm = (
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        .norm()
        .item()
    )
    return {
        "s": seconds,
        "cpu": cpu_seconds,
        "MiB": (peak - idle) / 1024,
        "tokens": tokens,
        "loss": loss,
        "norm": norm,
    }


def time_building(problems: int = 256) -> None:
    """Of problems with traces of 4096 tokens, one after the other; making up the tokens is not counted."""
    seconds, flat, distinct = 0.0, 0, 0
    for draw in track(range(problems), "building"):
        sequences = spiral_problem(256, 4096, 4096, draw=draw, vocab=151_936)
        start = time.process_time()
        distinct += build_tree(sequences).num_tokens
        seconds += time.process_time() - start
        flat += sum(s.num_tokens for s in sequences)
    print(f"{problems} problems, {flat / 1e6:.0f} M tokens flat, {distinct / 1e6:.0f} M in trees")
    print(f"built in {seconds:.1f} s of CPU, load {os.getloadavg()[0]:.1f}")


def main(
    shape: str = "spiral",
    prompt: int = 64,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest trace.")] = 256,
    longest: Annotated[int, typer.Option(help="Tokens of the longest trace.")] = 256,
    budget: Annotated[int, typer.Option(help="Tokens in a micro-batch.")] = 12_288,
    rounds: int = 3,
    build: bool = False,
    only: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if build:
        return time_building()
    make = {"spiral": spiral_problem, "grpo": grpo_problem}[shape]
    if only:
        print(json.dumps(measure(only, make(prompt, shortest, longest), budget)))
        return None
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name in CONTENDERS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.token_trees",
                *sys.argv[1:],
                "--only",
                name,
            ]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results[name].append(json.loads(output.splitlines()[-1]))
            print(
                f"  {name:7} {results[name][-1]['cpu']:7.2f} s of CPU, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    print(f"{shape}, traces of {shortest} to {longest} tokens; medians of {rounds} rounds")
    print(
        f"{'':8}{'tokens':>8}{'wall s':>8}{'CPU s':>8}{'MiB':>7}{'CPU / tree':>12}{'loss':>14}{'|gradient|':>14}"
    )
    base = statistics.median(run["cpu"] for run in results["tree"])
    for name, runs in results.items():
        m = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        row = f"{name:8}{m['tokens']:8.0f}{m['s']:8.2f}{m['cpu']:8.2f}{m['MiB']:7.0f}{m['cpu'] / base:12.2f}"
        print(f"{row}{m['loss']:14.6e}{m['norm']:14.6e}")
    return None


if __name__ == "__main__":
    typer.run(main)
