"""`spiral-mega eval` as a user starts it, on the demo's problems and small harnesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.runs import invoke

DEMO = "configs/demo.yaml"
HARNESSES = (
    "[{kind: pass_at_k, samples: 6}, {kind: majority, samples: 6}, {kind: sequential, samples: 4, budgets: [3, 8]},"
    " {kind: rsa, population: 4, set_size: 2, steps: 2},"
    " {kind: pipeline, name: short-then-long, reducer: majority,"
    "  stages: [{search: 4, tokens: 4}, {aggregate: 3, set_size: 2}]}]"
)
SMALL = [f"eval.harnesses={HARNESSES}", "eval.chunk=4", "data.eval.0.limit=10", "rewards.workers=1"]


def start(*arguments: str, ranks: int = 1) -> subprocess.Popen[str]:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    command = [sys.executable, *launcher, "-m", "spiral_mega", "eval", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def evaluate(*arguments: str, ranks: int = 1, status: int = 0, launched: bool = False) -> str:
    """Run to the end, in this process where one rank is enough; return what was printed.

    `launched`: in a process of its own, as vLLM needs.
    """
    if ranks == 1 and not launched:
        return invoke(["eval", *arguments], status=status).output
    process = start(*arguments, ranks=ranks)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == status, printed[-6000:]
    return printed


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())
