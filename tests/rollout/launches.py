"""The jobs that need several ranks, in as few launches as will do: starting a rank costs more than its work."""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from spiral_mega.config import Config
from spiral_mega.traces import SEARCH, Trace
from tests.rollout.scripted import problem, settings
from tests.support.ranks import run_ranks
from tests.support.tiny_models import save_tiny_model

FOLDER = tempfile.TemporaryDirectory(prefix="rollout-ranks-")
MODULUS = 3
FILTER_SAMPLES, FILTER_LOW, FILTER_HIGH = 4, 0.0, 1.0
WORD_SUM = "tests.rollout.verifiers:word_sum"
PROBLEMS = [
    problem(
        f"real/{i}",
        f"w{3 * i} w{3 * i + 1} w{i % 4}",
        answer=f"{i % MODULUS}/{MODULUS}",
        verifier=verifier,
    )
    for i, verifier in enumerate([WORD_SUM, "exact"] * 4)
]
FILTERED = [replace(each, verifier=WORD_SUM) for each in PROBLEMS]

STEPS = 3
CASES = {
    "half_effective": (50, 0.5, {"problems": 8, "max_resample_rounds": 6}),
    "rarely_effective": (50, 0.12, {"problems": 8, "max_resample_rounds": 3}),
    "nothing_effective": (50, 0.0, {"problems": 4, "max_resample_rounds": 2}),
    "all_effective": (50, 1.0, {"problems": 8}),
    "all_kept": (50, 0.5, {"problems": 8, "dynamic_sampling": False}),
    "fewer_problems_than_prompts": (3, 0.5, {"problems": 8, "max_resample_rounds": 6}),
    "one_problem_a_step": (50, 0.5, {"problems": 1, "max_resample_rounds": 9}),
    "no_second_round": (50, 0.5, {"problems": 8, "max_resample_rounds": 0}),
    "oversampled": (50, 0.5, {"problems": 8, "oversample": 1.5}),
    "fastest": (50, 0.5, {"problems": 8, "oversample": 1.5, "keep": "fastest"}),
    "oversampled, all kept": (
        50,
        0.5,
        {"problems": 8, "oversample": 1.5, "dynamic_sampling": False},
    ),
}


def trace(reward: float, logprobs: list[float], finish: Any, **more: Any) -> Trace:
    return Trace(
        SEARCH, 0, [1, 2, 3], [5] * len(logprobs), logprobs, finish, "", reward=reward, **more
    )


METRIC_TRACES = [
    trace(1.0, [-1.0, -2.0, float("-inf")], "stop"),
    trace(0.0, [-0.5], "length", gated=True, verification="timeout"),
    trace(0.5, [float("nan")], "stop", cached_tokens=3),
    trace(0.0, [], "length", verification="ok"),
]


@functools.cache
def real_config() -> Config:
    """The configuration of a real tiny model and of the data that is filtered with it."""
    folder = Path(FOLDER.name)
    model = save_tiny_model(folder / "model", "qwen3", seed=2)
    data = folder / "problems.jsonl"
    rows = [
        {
            "id": p.id,
            "messages": p.messages,
            "answer": p.answer,
            "verifier": p.verifier,
            "source": "",
        }
        for p in FILTERED
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return settings(
        run={"dir": str(folder / "run"), "seed": 6},
        model={"path": str(model)},
        data={"train": [{"path": str(data)}]},
        rollout={"engine.max_num_seqs": 5},
    )


def filter_output(world: int) -> Path:
    return Path(FOLDER.name) / f"kept{world}.jsonl"


@functools.cache
def _launch(world: int) -> list[dict[str, Any]]:
    jobs: dict[str, tuple[str, dict[str, Any]]] = {
        case: ("collect", {"num_problems": count, "share": share, "batch": batch, "steps": STEPS})
        for case, (count, share, batch) in CASES.items()
    }
    jobs |= {
        "late tasks": ("late_tasks", {"hesitating": False}),
        "late tasks, hesitating": ("late_tasks", {"hesitating": True}),
    }
    if world == 2:
        jobs |= {
            "episodes": ("episodes", {"config": real_config(), "problems": PROBLEMS}),
            "stopped_early": ("interruption", {"stopped": 1, "after": 4, "tasks": 5, "steps": 1}),
            "stopped_while_the_other_has_no_task": ("interruption", {"stopped": 0, "after": 0, "tasks": 1, "steps": 1}),
            "stopped_after_the_end": ("interruption", {"stopped": 1, "after": 14, "tasks": 2, "steps": 100}),
            "uneven": ("uneven", {"steps": 2}),
            "uneven, the first late": ("uneven", {"steps": 2, "waits_for": Path(FOLDER.name) / "gone-on"}),
            "metrics_of_both": ("metrics_of", {"parts": [METRIC_TRACES[:3], METRIC_TRACES[3:]]}),
            "metrics_of_one": ("metrics_of", {"parts": [[], METRIC_TRACES]}),
            "evaluation": ("scripted_evaluation", {"problems": 5, "repeats": 3}),
            "evaluation_of_one": ("scripted_evaluation", {"problems": 1, "repeats": 1}),
            "filter": (
                "filtering",
                {
                    "config": real_config(), "output": filter_output(2), "samples": FILTER_SAMPLES,
                    "low": FILTER_LOW, "high": FILTER_HIGH,
                },
            ),
        }  # fmt: skip
    return run_ranks(world, "tests.rollout.rank_jobs:run_jobs", jobs)


def of_ranks(world: int, job: str) -> list[Any]:
    """What `job` gave on each of `world` ranks."""
    return [rank[job] for rank in _launch(world)]


def run_folder() -> Path:
    return Path(real_config().run.dir)
