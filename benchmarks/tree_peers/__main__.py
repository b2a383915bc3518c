"""CPU-seconds of one update on SPIRAL's aggregation traces: ours and that of other trainers; one thread.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0 psutil
    python -m venv /tmp/verl && /tmp/verl/bin/pip install torch==2.13.0 verl==0.9.1 psutil
    python -m venv /tmp/areal && /tmp/areal/bin/pip install torch==2.13.0 transformers psutil
    /tmp/areal/bin/pip install --no-deps areal==1.0.4    # then, by name, the modules that its import asks for
    python -m benchmarks.tree_peers --trl /tmp/trl/bin/python --verl /tmp/verl/bin/python --areal /tmp/areal/bin/python

The batch is that of batch.py. Counted is everything from sequences with rewards to new weights, in a process of its own
that has updated once on short sequences before; contenders run in turns, those whose environment is given. What each of
them does, and what had to be put in for a CPU, is at the head of its file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from statistics import median

CONTENDERS = {
    "ours": "ours:update",
    "GRPOTrainer": "trl_trainers:grpo_trainer",
    "scored": "trl_trainers:grpo_trainer_scored",
    "TreeRow": "trl_trainers:tree_row",
    "verl": "verl_engine:padded",
    "AReaL": "areal_tree:update",
}


def main(pythons: dict[str, str], problems: int, turns: int) -> None:
    from benchmarks.step_vs_trl import save_model  # not in the other environments

    from .batch import VOCABULARY

    found: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, VOCABULARY)
        for turn in range(turns):
            for name in sorted(found, reverse=bool(turn % 2)):
                found[name].append(_child(pythons[name], name, folder, problems))
                each = found[name][-1]
                print(
                    f"{name:12} {each['cpu']:6.2f} CPU-s, loss {each['loss']:.6f}, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    medians = {name: median(each["cpu"] for each in runs) for name, runs in found.items()}
    ratios = ", ".join(
        f"{name} {value:.2f} ({value / medians['ours']:.2f} x)" for name, value in medians.items()
    )
    print(f"medians of {turns}, CPU-s: {ratios}; {os.cpu_count()} cores")


def _child(python: str, name: str, folder: str, problems: int) -> dict[str, float]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    environment["PYTHONPATH"] = os.getcwd()
    command = [python, "-m", "benchmarks.tree_peers", "--child", name, folder, str(problems)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {name} failed:\n{done.stderr[-3000:]}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        module, function = CONTENDERS[sys.argv[2]].split(":")
        run = getattr(importlib.import_module(f"benchmarks.tree_peers.{module}"), function)
        print(json.dumps(run(sys.argv[3], int(sys.argv[4]))))
    else:
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for peer in ("trl", "verl", "areal"):
            parser.add_argument(
                f"--{peer}", metavar="PYTHON", help=f"python of an environment with {peer}"
            )
        parser.add_argument(
            "--only",
            action="append",
            choices=CONTENDERS,
            help="this contender (and others so named)",
        )
        parser.add_argument("--problems", type=int, default=8)
        parser.add_argument("--turns", type=int, default=3)
        given = parser.parse_args()
        environments = {"ours": sys.executable, "trl_trainers": given.trl, "verl_engine": given.verl,
                        "areal_tree": given.areal}  # fmt: skip
        chosen = {name: environments[place.split(":")[0]] for name, place in CONTENDERS.items()}
        wanted = given.only or CONTENDERS
        main(
            {name: python for name, python in chosen.items() if python and name in wanted},
            given.problems,
            given.turns,
        )
