"""`python -m spiral_mega.reproduction` from end to end, cut short, and what it does when called again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spiral_mega.reproduction.runs import ARMS, CONFIGS, STARTS, jobs_for
from spiral_mega.validation.load import load_config

HARNESSES = (
    "[{kind: pass_at_k, samples: 4}, {kind: majority, samples: 4}, {kind: sequential, samples: 2, budgets: [4, 8]},"
    " {kind: rsa, population: 4, set_size: 2, steps: 1}]"
)
CUT = [
    "--start",
    "copying",
    "--seeds",
    "1",
    "--ablation-seeds",
    "0",
    "--steps",
    "2",
    "--arms",
    "spiral,grpo",
]
SMALL = ["batch.problems=2", "data.eval.0.limit=8", f"eval.harnesses={HARNESSES}"]


def reproduce(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "spiral_mega.reproduction", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_cut_reproduction_runs_to_its_tables_and_is_not_run_again(tmp_path):
    done = reproduce(*CUT, "--output", str(tmp_path), *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "copying" / "reproduction.json").read_text())
    assert list(report["arms"]) == ["start", "spiral", "grpo"]
    assert [len(arm["seeds"]) for arm in report["arms"].values()] == [1, 1, 1]
    assert {each["other"] for each in report["comparisons"]} == {"grpo"}
    assert [len(curve) for curve in report["arms"]["spiral"]["entropy"]] == [2]
    evaluated = tmp_path / "copying" / "spiral-2-seed0"
    settings = load_config(evaluated / "evaluation" / "config.yaml")
    assert settings.model.path == str(evaluated / "model")  # and not the start
    assert (tmp_path / "copying" / "reproduction.png").read_bytes().startswith(b"\x89PNG")
    assert "| SPIRAL minus |" in (tmp_path / "copying" / "reproduction.md").read_text()

    trained = {path: path.stat().st_mtime_ns for path in (tmp_path / "copying").glob("*-seed0/*/*")}
    again = reproduce(*CUT, "--output", str(tmp_path), *SMALL)
    assert "3 models, 3 of them measured before" in again.stdout
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "copying").glob("*-seed0/*/*")
    } == trained
    assert json.loads((tmp_path / "copying" / "reproduction.json").read_text()) == report


@pytest.mark.slow
def test_a_run_that_fails_is_named_with_its_output(tmp_path):
    done = reproduce(
        *CUT, "--parallel", "1", "--output", str(tmp_path), *SMALL, "model.path=/nowhere"
    )
    assert done.returncode == 2
    assert "start-seed0" in done.stderr
    assert "/nowhere" in done.stderr


def test_an_unknown_recipe_is_refused_before_anything_runs(tmp_path):
    import typer

    from spiral_mega.reproduction.__main__ import main

    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--arms", "spiral,ppo", "--output", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "'ppo'" in result.output
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("start", STARTS)
def test_all_recipes_share_the_start_the_task_and_the_number_of_problems(start):
    configs = {arm.name: load_config(arm.config, STARTS[start]) for arm in ARMS}
    task = load_config(CONFIGS / "task.yaml", STARTS[start])
    for config in configs.values():
        same = ("model", "data", "prompts", "batch", "optimizer", "policy", "eval")
        assert all(getattr(config, part) == getattr(task, part) for part in same)


def test_grpo_has_half_the_samples_and_the_paper_s_budget_of_tokens():
    spiral, grpo, grpo24 = (
        load_config(CONFIGS / f"{name}.yaml") for name in ("spiral", "grpo", "grpo24")
    )
    samples = (
        spiral.algorithm.search_traces
        + spiral.algorithm.num_sets * spiral.algorithm.aggregation_traces
    )
    budget = samples * spiral.rollout.sampling.max_response_tokens
    assert grpo.algorithm.search_traces == samples // 2
    assert grpo.algorithm.search_traces * grpo.rollout.sampling.max_response_tokens == budget
    assert grpo24.algorithm.search_traces * grpo24.rollout.sampling.max_response_tokens == budget


def test_a_cut_table_of_runs_has_whole_rounds_of_recipes_first():
    jobs = jobs_for(Path("out"), ARMS, 2, 1, 5, [])
    names = [job.name for job in jobs]
    main = [arm.name for arm in ARMS if not arm.ablation]
    assert names[0] == "start-seed0"
    assert names[1 : 1 + len(main)] == [f"{name}-5-seed0" for name in main]
    assert names[-1] == f"{[arm.name for arm in ARMS if arm.ablation][-1]}-5-seed0"
    assert len(set(names)) == len(names)
