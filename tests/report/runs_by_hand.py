"""Folders of runs whose every number is known, for the report."""

from __future__ import annotations

import json
import random
from pathlib import Path

from spiral_mega.evaluation.harnesses.harness import Measure
from spiral_mega.evaluation.results import results_json
from spiral_mega.telemetry.metrics_file import MetricsFile
from spiral_mega.telemetry.trace_file import trace_path, write_traces
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, Problem, Trace

HOSTILE = '</script><img src=x onerror="document.title=1"><script>alert(1)</script> & "quotes"'
SETS = [(0, 2), (1, 2), (0, 1)]


def write_metrics(folder: Path, rewards: list[float]) -> None:
    file = MetricsFile(folder / "metrics.jsonl")
    for step, reward in enumerate(rewards, 1):
        times = {"time/rollout": 3.0, "time/update": 1.0, "time/step": 4.5}
        file.append(
            step,
            {
                "reward/search": reward,
                "reward/aggregation": float("nan"),
                "entropy/search": 1.0,
                **times,
            },
        )
    file.close()


def write_results(folder: Path, passes: dict[int, list[float]]) -> None:
    """An evaluation with pass@k values a problem, and a self-aggregation of two steps."""
    tokens = {"prompt": 10.0, "generated": 100.0, "cached": 5.0}
    measures = [
        Measure(
            "pass_at_k",
            "pass",
            "k",
            k,
            k,
            values,
            {kind: k * n for kind, n in tokens.items()},
            200 * k,
        )
        for k, values in passes.items()
    ]
    for step, share in enumerate((0.5, 0.75)):
        values = [share] * len(passes[1])
        spent = {kind: 8 * (step + 1) * n for kind, n in tokens.items()}
        measures.append(Measure("rsa", "mean", "step", step, 8, values, spent, 1600 * (step + 1)))
    results = results_json(measures, [f"p{i}" for i in range(len(passes[1]))], 0)
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))


def trace(
    component: str, index: int, reward: float, text: str, set_index: int | None = None, **more
) -> Trace:
    return Trace(
        component, index, [1], [2, 3], [-1.0, -1.0], "stop", text, set_index, reward, **more
    )


def episode(name: str, *, flag: str = "") -> Episode:
    """Three search traces, three sets of two, one answer each; `flag` is what is wrong with the first trace."""
    search = [
        trace(SEARCH, i, float(i == 0), f"{name} search {i}", advantage=(i - 1) / 4)
        for i in range(3)
    ]
    if flag == "truncated":
        search[0].finish = "length"
    if flag == "gated":
        search[0].gated = True
    if flag == "failed":
        search[0].verification = "timeout"
    if flag == "idle":
        search = [trace(SEARCH, i, 0.0, f"{name} search {i}") for i in range(3)]
    answers = [[trace(AGGREGATION, 0, float(l == 0), f"{name} answer to {l}", l)] for l in range(3)]
    problem = Problem(name, ({"role": "user", "content": f"problem {name}"},), ("42",), "exact")
    return Episode(problem, 0, search, SETS, answers, index=0)


def write_small_run(folder: Path) -> Path:
    """Steps 1 to 3 with one ordinary episode each, and at step 3 one for each flag and a hostile one."""
    write_metrics(folder, [0.1, 0.2, 0.375])
    special = [episode(flag, flag=flag) for flag in ("truncated", "gated", "failed", "idle")] + [
        episode(HOSTILE)
    ]
    for step in (1, 2, 3):
        write_traces(
            trace_path(folder, step, 0), [episode(f"plain{step}"), *(special if step == 3 else [])]
        )
    write_results(folder / "evaluation", {1: [1.0, 0.0], 2: [1.0, 1.0]})
    return folder


def write_large_run(folder: Path, traces: int) -> Path:
    """Episodes of 24 traces with texts of 400 characters, `traces` traces in all."""
    rng = random.Random(0)
    count = traces // 24
    for step in range(1, 11):
        episodes = []
        for i in range(count * (step - 1) // 10, count * step // 10):
            search = [
                trace(SEARCH, j, float(rng.random() < 0.3), rng.randbytes(200).hex())
                for j in range(8)
            ]
            sets = [tuple(rng.sample(range(8), 4)) for _ in range(4)]
            answers = [
                [
                    trace(AGGREGATION, j, float(rng.random() < 0.5), rng.randbytes(200).hex(), l)
                    for j in range(4)
                ]
                for l in range(4)
            ]
            problem = Problem(
                f"large/{i}", ({"role": "user", "content": f"problem {i}"},), ("1",), "exact"
            )
            episodes.append(Episode(problem, step, search, sets, answers, index=i))
        write_traces(trace_path(folder, step, 0), episodes)
    return folder
