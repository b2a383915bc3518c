"""Job scripts request the given resources; torchrun.sh joins nodes; the health check finds bad nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from spiral_mega.cli import app
from spiral_mega.launch.health import (
    Limits,
    Report,
    check_node,
    compare,
    format_lines,
    gpu_problems,
)

ROOT = Path(__file__).parents[2]
LIMITS = Limits(
    min_disk_gib=1,
    min_shm_gib=0,
    min_gpu_free=0.95,
    max_clock_skew_s=5,
    min_speed=0.8,
    min_bandwidth=100,
)


def launch(folder: Path, *options: str) -> str:
    """Return the script that `spiral-mega launch --dry-run` prints."""
    command = [
        "launch",
        str(ROOT / "configs/demo.yaml"),
        "--dry-run",
        *options,
        f"run.dir={folder}",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert (folder / "launch" / "train.sbatch").read_text() == result.output
    checked = subprocess.run(["bash", "-n"], input=result.output, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    return result.output


def directives(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))


def test_a_script_requests_the_resources_of_the_command(tmp_path: Path) -> None:
    script = launch(
        tmp_path,
        "--nodes=4",
        "--spares=1",
        "--time=2:00:00",
        "--account=lab",
        "--stop-seconds=540",
        "--sbatch=--qos=high",
    )
    found = directives(script)
    expected = {
        "nodes": "5",
        "gpus-per-node": "8",
        "time": "2:00:00",
        "account": "lab",
        "qos": "high",
    }
    assert expected.items() <= found.items()
    assert found["signal"] == "B:USR1@600"
    assert {"requeue", "no-kill", "exclusive"} <= found.keys()
    assert "partition" not in found
    assert "\nNODES=4\n" in script


def test_without_gpus_none_are_requested(tmp_path: Path) -> None:
    found = directives(launch(tmp_path, "--nodes=1", "--gpus-per-node=0", "--ranks-per-node=2"))
    assert not {"gpus-per-node", "exclusive"} & found.keys()


def test_arguments_reach_the_trainer_unchanged(tmp_path: Path) -> None:
    value = 'prompts.search=It\'s {problem} & "more" $HOME'
    script = launch(tmp_path, "--nodes=1", value)
    [line] = [line for line in script.splitlines() if line.startswith("set -- ")]
    printed = subprocess.run(
        ["bash", "-c", f'{line}\nprintf "%s\\n" "$@"'], capture_output=True, text=True
    ).stdout
    assert printed.splitlines() == [str(ROOT / "configs/demo.yaml"), value, f"run.dir={tmp_path}"]


def test_a_container_is_passed_to_pyxis(tmp_path: Path) -> None:
    """Only the flags: pyxis itself has not been run here."""
    script = launch(
        tmp_path,
        "--nodes=1",
        "--container-image=nvcr.io#nvidia/pytorch:26.01",
        "--container-mounts=/d:/d",
    )
    settings = (
        script[: script.index("\nset -- ")]
        + f"\nSLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=1 RUN_DIR={tmp_path}"
    )
    shown = 'on node1 node2; printf "%s\\n" "${srun[@]}"'
    command = f"{settings}\n. $SPIRAL_HOME/launch/slurm/lifecycle.sh\n{shown}"
    words = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words[0] == "srun"
    assert "--nodelist=node1,node2" in words
    assert {"--container-image=nvcr.io#nvidia/pytorch:26.01", "--container-mounts=/d:/d"} <= set(
        words
    )


def test_mistakes_are_reported_before_anything_is_submitted(tmp_path: Path) -> None:
    for options, message in (
        (["--nodes=1", "rollout.temprature=1"], "did you mean 'sampling.temperature'?"),
        (["--nodes=1", "--gpus-per-node=0"], "--ranks-per-node"),
        (["--nodes=1", "--sbatch=qos"], "is not an option of sbatch"),
    ):
        result = CliRunner().invoke(
            app, ["launch", str(ROOT / "configs/demo.yaml"), *options, f"run.dir={tmp_path}"]
        )
        assert result.exit_code == 2
        assert message in result.output
    assert not list(tmp_path.iterdir())


def test_every_script_is_bash(tmp_path: Path) -> None:
    scripts = [ROOT / "launch" / "torchrun.sh", *sorted((ROOT / "launch" / "slurm").iterdir())]
    assert len(scripts) == 4
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)


def test_two_nodes_without_slurm_meet_and_see_each_other(tmp_path: Path) -> None:
    """torchrun.sh on each of two nodes, configured by the environment; here both are this machine."""
    environment = os.environ | {
        "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "NODES": "2", "RANKS_PER_NODE": "1",
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29871", "LOG_DIR": str(tmp_path),
    }  # fmt: skip
    health = [
        "-m",
        "spiral_mega.launch.health",
        f"--folder={tmp_path}",
        "--min-disk-gib=0",
        "--min-shm-gib=0",
        "--min-speed=0",
    ]
    nodes = [
        subprocess.Popen(
            [ROOT / "launch" / "torchrun.sh", "--node-rank", str(node), *health],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    printed = "".join(node.communicate(timeout=300)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert re.search(r"health: ok \S+ \(2 x cpu, .* TFLOP/s, all-reduce .* GB/s", printed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node0", "node1"]


def report(host: str, rank: int, **values: float) -> Report:
    figures = {"clock": 100.0, "rate": 600.0, "bandwidth": 300.0} | values
    return Report(host, rank, "NVIDIA H200", [], 1000.0, **figures, versions={"torch": "2.13.0"})


def test_nodes_are_compared_with_each_other() -> None:
    reports = [
        report("a", 0),
        report("b", 1, clock=112.0),
        report("c", 2, rate=400.0),
        report("d", 3),
        report("e", 4),
    ]
    reports[3].versions["torch"] = "2.12.0"
    printed = format_lines(compare(reports, LIMITS))
    assert (
        printed[0]
        == "health: ok a (1 x NVIDIA H200, 600 TFLOP/s, all-reduce 300.00 GB/s, 1000 GiB free)"
    )
    assert "health: bad b: its clock is +12.0 s from the others'" in printed
    assert printed[2].startswith(
        "health: bad c: rank 2 multiplies at 400 TFLOP/s, below 0.8 of the median (600)"
    )
    assert printed[3].startswith(
        "health: bad d: it has {'torch': '2.12.0'}, others {'torch': '2.13.0'}"
    )
    slow = format_lines(
        compare([report("a", 0, bandwidth=40.0), report("b", 1, bandwidth=40.0)], LIMITS)
    )
    assert slow[0] == "health: bad a: all-reduce at 40.00 GB/s, below 100"


def test_a_node_without_space_is_bad(tmp_path: Path) -> None:
    limits = Limits(
        min_disk_gib=1e9,
        min_shm_gib=1e9,
        min_gpu_free=0.95,
        max_clock_skew_s=5,
        min_speed=0.8,
        min_bandwidth=0,
    )
    problems = check_node(tmp_path / "not" / "there", [torch.device("cpu")], limits).problems
    assert f"GiB are free at {tmp_path}, fewer than 1e+09" in problems[0]
    assert "in /dev/shm" in problems[1]


@pytest.mark.parametrize(
    ("table", "problems"),
    [
        (
            "0, Not Active, Not Active, Not Active, 0\n1, Not Active, Not Active, Not Active, [N/A]\n",
            [],
        ),
        ("0, Active, Not Active, Not Active, 0\n", ["GPU 0 runs at a lowered clock (hw_slowdown)"]),
        ("3, Not Active, Not Active, Not Active, 2\n", ["GPU 3 has 2 uncorrected memory errors"]),
    ],
)
def test_nvidia_smi_reports_of_a_gpu_are_parsed(table: str, problems: list[str]) -> None:
    assert gpu_problems(table) == problems
