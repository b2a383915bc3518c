"""Two models end to end: trained, killed, resumed, exported and evaluated; the cheap form and the general one."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from spiral_mega.prompts.prompter import Prompter
from spiral_mega.telemetry import read_metrics
from spiral_mega.telemetry.trace_file import episode_from_row, read_traces
from spiral_mega.validation.load import load_config
from tests.e2e.evaluations import evaluate
from tests.e2e.runs import (
    FinishedRun,
    RunFolder,
    TrainingRun,
    assert_same_run,
    copied,
    final_weights,
    train_here,
)

pytestmark = pytest.mark.slow

ADAPTERS, MODELS = "configs/recipes/adapters.yaml", "configs/recipes/two_models.yaml"
START = load_file("configs/demo/model/model.safetensors")
HARNESSES = "eval.harnesses=[{kind: rsa, population: 4, set_size: 2, steps: 2}]"
PROBLEMS = "data.eval=[{path: configs/demo/heldout.jsonl, verifier: arithmetic, limit: 4}]"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return TrainingRun(tmp_path_factory.mktemp("adapters") / "run", config=ADAPTERS).finish()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return train_here(tmp_path_factory.mktemp("models") / "run", "run.steps=3", config=MODELS)


@pytest.mark.parametrize("name", ["adapters", "models"])
def test_each_trace_is_learnt_from_by_the_model_that_wrote_it(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Each model's log-probs are those that its traces were sampled with, in every step of models that part."""
    run: RunFolder = request.getfixturevalue(name)
    for record in run.metrics():
        for model in ("search", "aggregation"):
            assert record[f"sampler/log_ratio_abs_max/{model}"] < 1e-4
            assert record[f"sync/logprob_gap/{model}"] < 1e-4
            assert record[f"optim/updates/{model}"] == 1
            assert record[f"optim/grad_norm/{model}"] > 0
        assert "optim/grad_norm" not in record
    assert (
        run.metrics()[0]["optim/grad_norm/search"]
        != run.metrics()[0]["optim/grad_norm/aggregation"]
    )


def test_two_adapters_resume_bit_for_bit_and_refuse_a_change(
    adapters: TrainingRun, tmp_path: Path
) -> None:
    folder = copied(adapters, tmp_path / "run", checkpoints=[4])
    again = TrainingRun(folder, config=ADAPTERS).finish()
    assert "resumed from step 4" in again.output()
    assert_same_run(adapters, again)
    refused = train_here(
        folder, "two_models.frozen=search", "run.steps=6", config=ADAPTERS, status=2
    )
    assert "two_models.frozen was None and is 'search'" in refused.output()


def test_two_models_go_on_from_a_checkpoint_bit_for_bit(
    models: FinishedRun, tmp_path: Path
) -> None:
    folder = copied(models, tmp_path / "run", checkpoints=[2])
    again = train_here(folder, "run.steps=3", config=MODELS)
    assert "resumed from step 2" in again.output()
    assert again.metrics() == models.metrics()
    ours, theirs = final_weights(again), final_weights(models)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_frozen_aggregator_is_in_no_checkpoint_and_leaves_as_it_came(tmp_path: Path) -> None:
    changes = (
        "run.steps=2",
        "two_models.frozen=aggregation",
        "two_models.aggregation_optimizer=null",
    )
    run = train_here(tmp_path / "run", *changes, config=MODELS)
    search, aggregation = (
        load_file(run.folder / "model" / model / "model.safetensors")
        for model in ("search", "aggregation")
    )
    assert all(torch.equal(aggregation[name], START[name]) for name in START)
    assert not all(torch.equal(search[name], START[name]) for name in START)
    stored = (
        FileSystemReader(run.folder / "checkpoints" / "step_000002")
        .read_metadata()
        .state_dict_metadata
    )
    assert {name.split(".")[0] for name in stored if name.startswith("policy")} == {"policy_search"}
    for record in run.metrics():
        assert record["optim/updates/search"] == 1
        assert "optim/updates/aggregation" not in record
        assert "weight/aggregation" not in record
        assert record["sync/logprob_gap/aggregation"] < 1e-4


def test_an_evaluation_searches_with_theta_and_aggregates_with_phi(
    models: FinishedRun, tmp_path: Path
) -> None:
    """Every trace of it, at every level, has the log-probs that transformers gives with that model's export."""
    evaluate(
        "--model",
        str(models.folder),
        PROBLEMS,
        HARNESSES,
        "rewards.workers=1",
        "--output",
        str(tmp_path),
    )
    config = load_config(models.folder / "config.yaml")
    prompter = Prompter(config.prompts, AutoTokenizer.from_pretrained(config.model.path))
    both = {
        name: AutoModelForCausalLM.from_pretrained(
            models.folder / "model" / name, dtype=torch.float32
        )
        for name in ("search", "aggregation")
    }
    own, others, components = [], [], set()
    files = sorted((tmp_path / "traces").rglob("*.parquet"))
    for episode in (episode_from_row(row) for file in files for row in read_traces(file)):
        traces = episode.traces()
        for trace in traces:
            prompt = prompter.search_prompt(episode.problem)
            if trace.set_index is not None:
                shown = [traces[i] for i in episode.sets[trace.set_index]]
                prompt = prompter.aggregation_prompt(episode.problem, shown)
            writer = "search" if trace.set_index is None else "aggregation"
            for name, model in both.items():
                gap = float(
                    (logprobs(model, prompt, trace.response_ids) - torch.tensor(trace.logprobs))
                    .abs()
                    .max()
                )
                (own if name == writer else others).append(gap)
            components.add(trace.component)
    assert components == {"search", "aggregation", "aggregation_2"}
    assert max(own) < 1e-4
    assert min(others) > 1e-3


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_two_adapters_move_their_own_goal_up(tmp_path: Path) -> None:
    changes = ("run.steps=18", "batch.problems=24", "checkpoint.every=100")
    run = train_here(tmp_path / "run", *changes, config=ADAPTERS)
    rewards = [record["reward/aggregation"] for record in read_metrics(run.folder)]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.02
