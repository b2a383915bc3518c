"""Two models end to end: trained, killed, resumed, exported and evaluated; the cheap form and the general one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from spiral_mega.telemetry import read_metrics
from tests.e2e.evaluations import evaluate, results
from tests.e2e.runs import TrainingRun, assert_same_run

pytestmark = pytest.mark.slow

ADAPTERS, MODELS = "configs/recipes/adapters.yaml", "configs/recipes/two_models.yaml"
START = load_file("configs/demo/model/model.safetensors")
HARNESSES = "eval.harnesses=[{kind: majority, samples: 6}, {kind: rsa, population: 6, set_size: 2, steps: 2}]"
PROBLEMS = "data.eval=[{path: configs/demo/heldout.jsonl, kind: arithmetic, limit: 16}]"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return TrainingRun(tmp_path_factory.mktemp("adapters") / "run", config=ADAPTERS).finish()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Three steps at a rate at which both models are soon others than the start, and than each other."""
    changes = ("run.steps=3", "optimizer.lr=3e-3", "two_models.aggregation_optimizer={lr: 1e-2}")
    return TrainingRun(tmp_path_factory.mktemp("models") / "run", *changes, config=MODELS, ranks=1).finish()


@pytest.mark.parametrize("name", ["adapters", "models"])
def test_each_trace_is_learnt_from_by_the_model_that_wrote_it(name: str, request: pytest.FixtureRequest) -> None:
    """Each model's log-probs are those that its traces were sampled with, in every step of models that part."""
    run: TrainingRun = request.getfixturevalue(name)
    for record in run.metrics():
        for model in ("search", "aggregation"):
            assert record[f"sampler/log_ratio_abs_max/{model}"] < 1e-4
            assert record[f"sampler/canary_gap/{model}"] < 1e-4
            assert record[f"optim/updates/{model}"] == 1
            assert record[f"optim/grad_norm/{model}"] > 0
        assert "optim/grad_norm" not in record
    assert run.metrics()[0]["optim/grad_norm/search"] != run.metrics()[0]["optim/grad_norm/aggregation"]


def test_a_killed_run_of_two_adapters_resumes_bit_for_bit(adapters: TrainingRun, tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "run", config=ADAPTERS)
    run.wait_for(lambda: run.reached(3) and (run.folder / "checkpoints" / "step_000002").is_dir())
    os.kill(run.rank_pids()[0], signal.SIGKILL)
    run.finish(status=1)
    again = TrainingRun(tmp_path / "run", config=ADAPTERS).finish()
    assert "resumed from step" in again.output()
    assert_same_run(adapters, again)
    refused = TrainingRun(tmp_path / "run", "two_models.frozen=search", "run.steps=6", config=ADAPTERS).finish(status=1)
    assert "two_models.frozen was None and is 'search'" in refused.output()


def test_a_frozen_aggregator_is_in_no_checkpoint_and_leaves_as_it_came(tmp_path: Path) -> None:
    changes = ("run.steps=2", "two_models.frozen=aggregation")
    run = TrainingRun(tmp_path / "run", *changes, config=MODELS).finish()
    search, aggregation = (
        load_file(run.folder / "model" / model / "model.safetensors") for model in ("search", "aggregation")
    )
    assert all(torch.equal(aggregation[name], START[name]) for name in START)
    assert not all(torch.equal(search[name], START[name]) for name in START)
    stored = FileSystemReader(run.folder / "checkpoints" / "step_000002").read_metadata().state_dict_metadata
    assert {name.split(".")[0] for name in stored if name.startswith("policy")} == {"policy_search"}
    for record in run.metrics():
        assert record["optim/updates/search"] == 1
        assert "optim/updates/aggregation" not in record
        assert "weight/aggregation" not in record
        assert record["sampler/canary_gap/aggregation"] < 1e-4


def measured(folder: Path, *arguments: str) -> dict[tuple[str, str, int], Any]:
    evaluate(*arguments, PROBLEMS, HARNESSES, "rewards.workers=1", "--output", str(folder))
    return {(each["harness"], each["metric"], each["x"]): each["values"] for each in results(folder)["measures"]}


def test_an_evaluation_searches_with_theta_and_aggregates_with_phi(models: TrainingRun, tmp_path: Path) -> None:
    """As the checkpoint's is, so is that of the two exports; theta's alone has its search and another aggregation."""
    theta, phi = (models.folder / "model" / model for model in ("search", "aggregation"))
    both = measured(tmp_path / "both", "--model", str(models.folder))
    paths = (f"model.path={theta}", f"two_models.aggregation_model={{path: {phi}}}")
    assert measured(tmp_path / "exports", MODELS, *paths) == both
    alone = {path: measured(tmp_path / path.name, "--model", str(path)) for path in (theta, phi)}
    searched = {key for key in both if key[0] == "majority" or key[2] == 0}
    assert {key: alone[theta][key] for key in searched} == {key: both[key] for key in searched}
    assert any(alone[theta][key] != both[key] for key in both.keys() - searched)
    assert any(alone[phi][key] != both[key] for key in searched)


def test_two_adapters_move_their_own_goal_up(tmp_path: Path) -> None:
    changes = ("run.steps=18", "batch.problems=24", "checkpoint.every=100")
    run = TrainingRun(tmp_path / "run", *changes, config=ADAPTERS, ranks=1).finish(timeout=500)
    rewards = [record["reward/aggregation"] for record in read_metrics(run.folder)]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.02
