"""Time and memory of the fused head, forward and backward, compared with other implementations and matrix products.

    python -m benchmarks.linear_logprob --tokens 4096 --hidden 1024 --dtype bfloat16 --rounds 3

Every run is a process of its own, and a round runs each contender once, so that a drift of the machine's speed meets
them all. `floor` is the four products that any implementation without whole logits needs: logits forward, logits again
backward, and the gradients of hidden states and weight. Peers are measured when they can be imported; none is needed:

    pip install --no-deps --target peers cut-cross-entropy trl liger-kernel && export PYTHONPATH=peers
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional as F

from spiral_mega.kernels import linear_logprob

Outputs = tuple[
    torch.Tensor, ...
]  # log-probs [T], and entropies [T] where the contender gives them
CONTENDERS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]] = {}


def contender(name: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        CONTENDERS[name] = function
        return function

    return register


@contender("ours")
def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    outputs = linear_logprob(hidden, weight, targets)
    return outputs.logprob, outputs.entropy


@contender("ours, entropy without gradient")
def ours_as_policy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    return (linear_logprob(hidden, weight, targets).logprob,)


@contender("ours, 25 % of rows")
def ours_of_some_rows(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    rows = torch.arange(0, len(hidden), 4, device=hidden.device)
    outputs = linear_logprob(hidden[rows], weight, targets[rows])
    return outputs.logprob, outputs.entropy


@contender("log_softmax")
def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    logprobs = F.log_softmax(F.linear(hidden, weight).float(), -1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@contender("log_softmax, no entropy")
def naive_logprob(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    return (F.log_softmax(F.linear(hidden, weight).float(), -1).gather(1, targets[:, None])[:, 0],)


@contender("F.linear_cross_entropy, no entropy")
def torch_chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    options = torch.nn.LinearCrossEntropyOptions()
    return (-F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options),)


@contender("TRL selective_log_softmax, no entropy")
def trl(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    from trl.trainer.utils import selective_log_softmax

    return (selective_log_softmax(F.linear(hidden, weight)[None], targets[None])[0],)


@contender("cut-cross-entropy, no entropy")
def cut_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    from cut_cross_entropy import linear_cross_entropy

    impl = "cce" if hidden.is_cuda else "torch_compile"
    return (-linear_cross_entropy(hidden, weight, targets, reduction="none", impl=impl),)


@contender("Liger fused linear cross-entropy, no entropy")
def liger(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Outputs:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return (-liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none"),)


def inputs(
    tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, ...]:
    """Hidden states and weights such that logits have a deviation of 3, as those of trained models about do."""
    generator = torch.Generator(device).manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator, device=device)
    weight = torch.randn(vocab, hidden, generator=generator, device=device).mul_(3 * hidden**-0.5)
    targets = torch.randint(vocab, (tokens,), generator=generator, device=device)
    return states.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def floor(hidden: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
    """Four products, on as many rows at a time as the buffer for logits [t, V] has."""
    with torch.no_grad():
        for rows in hidden.split(len(logits)):
            tile = logits[: len(rows)]
            torch.mm(rows, weight.T, out=tile)
            torch.mm(rows, weight.T, out=tile)
            torch.mm(tile, weight)
            torch.mm(tile.T, rows)


def measure(
    name: str, tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: str
) -> dict[str, float]:
    """Seconds of wall and CPU, and the peak of memory in MiB beyond inputs and their gradients."""
    states, weight, targets = inputs(tokens, hidden, vocab, dtype, device)
    if name == "floor":
        buffer = torch.zeros(min(tokens, 4096), vocab, dtype=dtype, device=device)

        def run() -> None:
            floor(states, weight, buffer)
    else:

        def run() -> None:
            total = sum(output.sum() for output in CONTENDERS[name](states, weight, targets))
            total.backward()

    for size in (
        () if name == "floor" else (64, 96)
    ):  # what is set up or compiled at first, and for a second shape
        small = [tensor.detach()[:size].clone().requires_grad_() for tensor in (states, weight)]
        sum(output.sum() for output in CONTENDERS[name](*small, targets[:size] % size)).backward()
    if device == "cuda":
        run()
        states.grad = weight.grad = None
    gradients = 0 if name == "floor" else (states.numel() + weight.numel()) * dtype.itemsize
    before = _memory(device, peak=False)
    _synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    _synchronize(device)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "wall": wall,
        "cpu": cpu,
        "memory": (_memory(device, peak=True) - before - gradients) / 2**20,
    }


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _memory(device: str, peak: bool) -> int:
    if device == "cuda":
        if not peak:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if not peak:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew from here
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+)", file.read())[1]) * 1024


def main(
    tokens: Annotated[int, typer.Option(min=1)] = 4096,
    hidden: Annotated[int, typer.Option(min=1)] = 1024,
    vocab: Annotated[int, typer.Option(min=64)] = 151_936,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    only: Annotated[
        list[str], typer.Option(help="contenders, all by default; repeat the option")
    ] = [],  # noqa: B006
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare implementations of log-probs from hidden states, forward and backward."""
    torch.set_num_threads(threads)
    shape = (tokens, hidden, vocab, getattr(torch, dtype), device)
    if child:
        print(json.dumps(measure(child, *shape)))
        return
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    print(
        f"T={tokens} H={hidden} V={vocab} {dtype}, {threads} thread(s), {rounds} round(s)",
        flush=True,
    )
    names = only or ["floor", *CONTENDERS]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    for index in range(rounds):
        print(f"round {index + 1}, load {os.getloadavg()[0]:.1f}", flush=True)
        for name in [name for name in names if name not in failed]:
            command = [
                sys.executable,
                "-m",
                "benchmarks.linear_logprob",
                *sys.argv[1:],
                "--child",
                name,
            ]
            result = subprocess.run(command, env=environment, capture_output=True, text=True)
            if result.returncode:
                lines = [line for line in result.stderr.splitlines() if line.strip(" │╰╯─")]
                failed[name] = (
                    lines[-1].strip(" │") if lines else f"ended by signal {-result.returncode}"
                )
            else:
                runs[name].append(json.loads(result.stdout.splitlines()[-1]))
    medians = {
        n: {k: statistics.median(run[k] for run in r) for k in r[0]} for n, r in runs.items() if r
    }
    base = medians.get("floor", {"cpu": float("nan"), "wall": float("nan")})
    print(f"{'':45s} {'CPU s':>8s} {'wall s':>8s} {'x floor':>8s} {'MiB':>8s}")
    which = "wall" if device == "cuda" else "cpu"
    for name, found in medians.items():
        ratio = found[which] / base[which]
        print(
            f"{name:45s} {found['cpu']:8.2f} {found['wall']:8.2f} {ratio:8.2f} {found['memory']:8.0f}"
        )
    for name, reason in failed.items():
        print(f"{name}: does not run ({reason})")


if __name__ == "__main__":
    typer.run(main)
