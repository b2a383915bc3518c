"""What a run does besides surviving: the same episodes on any ranks, other objectives, batches without a signal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from spiral_mega.telemetry.trace_file import read_traces
from spiral_mega.validation.load import load_config
from tests.e2e.runs import TrainingRun, train_here

pytestmark = pytest.mark.slow


def test_the_same_problems_get_the_same_traces_on_any_number_of_ranks(tmp_path: Path) -> None:
    """The first step's traces, before any weight has changed, do not depend on who sampled them."""
    texts = []
    for run in (
        train_here(tmp_path / "1", "run.steps=1"),
        TrainingRun(tmp_path / "2", "run.steps=1").finish(),
    ):
        rows = [
            row
            for path in (run.folder / "traces").glob("step_000001.*")
            for row in read_traces(path)
        ]
        texts.append(
            {
                row["problem_id"]: (row["sets"], [t["response_ids"] for t in row["traces"]])
                for row in rows
            }
        )
    assert texts[0] == texts[1]
    assert len(texts[0]) >= 4


def test_a_replay_on_another_number_of_ranks_makes_the_recorded_updates_without_an_engine(
    tmp_path: Path,
) -> None:
    steps = "run.steps=2"
    recorded = TrainingRun(
        tmp_path / "recorded", steps, f"rollout.record.write={tmp_path / 'record'}"
    ).finish()
    replayed = train_here(
        tmp_path / "replayed", steps, f"rollout.record.read={tmp_path / 'record'}"
    )
    for ours, theirs in zip(replayed.metrics(), recorded.metrics(), strict=True):
        for name in (
            "train/loss",
            "train/tokens",
            "optim/grad_norm",
            "batch/prompts_sampled",
            "reward/aggregation",
        ):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
        assert "sync/logprob_gap" not in ours
    folders = (Path("configs/demo/model"), recorded.folder / "model", replayed.folder / "model")
    start, theirs, ours = (torch.cat([w.flatten() for _, w in sorted(load_file(folder / "model.safetensors").items())])
                           for folder in folders)  # fmt: skip
    # As a whole: Adam turns the rounding of what is next to no gradient into a step of its own.
    assert float((ours - theirs).norm()) < 1e-3 * float((theirs - start).norm())


def test_a_run_leaves_what_its_documentation_promises(tmp_path: Path) -> None:
    run = TrainingRun(
        tmp_path / "run",
        "run.steps=2",
        "data.eval=[{path: configs/demo/heldout.jsonl, verifier: arithmetic, limit: 4}]",
        "telemetry.tensorboard=true",
    ).finish()
    assert load_config(run.folder / "config.yaml").run.steps == 2
    for name in (
        "metrics.jsonl",
        "curves.png",
        "status.json",
        "logs/rank0.log",
        "logs/rank1.log",
        "tensorboard",
    ):
        assert (run.folder / name).exists(), name
    assert "eval/aggregation_accuracy" in run.output()
    needed = [
        *(
            "reward/search",
            "reward/aggregation",
            "length/search",
            "length/aggregation",
            "gated/search",
        ),
        *(
            "gated/aggregation",
            "batch/effective_share",
            "entropy/search",
            "entropy/aggregation",
            "entropy/trained",
        ),
        *(
            "sampler/log_ratio_mean",
            "sampler/log_ratio_abs_max",
            "optim/grad_norm",
            "truncated/search",
            "truncated/aggregation",
        ),
    ]
    steps = run.metrics()[1:]
    assert len(steps) == 2
    for record in steps:
        assert not [name for name in needed if name not in record]
        assert record["sampler/log_ratio_abs_max"] < 1e-4  # the sampler had the trainer's weights
    timed = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()][
        1
    ]
    for name in (
        "time/rollout",
        "time/update",
        "time/sync",
        "throughput/tokens_per_s",
        "memory/peak_rss_gib",
    ):
        assert timed[name] > 0
    model = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    assert AutoTokenizer.from_pretrained(run.folder / "model").chat_template
    assert model.generation_config.eos_token_id is not None


def test_a_batch_without_any_signal_changes_nothing_and_does_not_crash(tmp_path: Path) -> None:
    """No response can be right, so every advantage is zero: the bound on rounds is reached, the step has no update."""
    rows = [
        {
            "id": str(i),
            "problem": "3 41",
            "answer": '{"start": 3, "target": 64, "moves": [[5, 1]], "modulus": 64}',
        }
        for i in range(6)
    ]
    data = tmp_path / "impossible.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train_here(
        tmp_path / "run",
        f"data.train=[{{path: {data}, verifier: arithmetic}}]",
        "run.steps=2",
        "batch.max_resample_rounds=2",
    )
    assert len(run.metrics()) == 2
    for record in run.metrics():
        assert record["batch/effective_share"] == 0
        assert record["batch/prompts_sampled"] == 3 * 4
        assert record["optim/updates"] == 0
        assert record["batch/prompts_kept"] == 0
    before = load_file("configs/demo/model/model.safetensors")
    after = load_file(run.folder / "model" / "model.safetensors")
    assert all(after[name].equal(before[name]) for name in before)


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "algorithm.objective=grpo",
            "algorithm.options.normalize_std=true",
            "algorithm.loss.name=ppo_clip",
            "batch.minibatches=2",
        ),
        (
            "algorithm.set_design=balanced",
            "algorithm.component_weights=unbiased",
            "algorithm.loss_reduction=token_mean",
        ),
        ("algorithm.loss.name=gspo", "algorithm.target_length=5", "policy.param_dtype=bfloat16"),
        (
            "algorithm.loss.name=cispo",
            "policy.activation_checkpointing=true",
            "optimizer.schedule=cosine",
        ),
        (
            "algorithm.objective=passk",
            "algorithm.num_sets=70",
            "algorithm.component_weights=unbiased",
        ),
    ],
    ids=["grpo", "balanced", "gspo", "cispo", "passk"],
)
def test_other_recipes_run_in_the_same_loop(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = train_here(tmp_path / "run", "run.steps=2", *overrides)
    last = run.metrics()[-1]
    assert last["optim/updates"] == (2 if "batch.minibatches=2" in overrides else 1)
    assert 0 < last["optim/grad_norm"] < 1e6
    trained = {name.partition("/")[2] for name in last if name.startswith("weight/")}
    assert trained == {name for name in ("search", "aggregation") if f"reward/{name}" in last}
    if "algorithm.component_weights=unbiased" in overrides:
        assert all(
            last[f"weight/{name}"] * last[f"scale/{name}"] == pytest.approx(1) for name in trained
        )
    searches_only = {"algorithm.objective=grpo", "algorithm.objective=passk"} & {*overrides}
    assert ("reward/aggregation" in last) == (not searches_only)


def test_regularizers_reach_traces_without_credit_and_measure_the_distance_from_the_start(
    tmp_path: Path,
) -> None:
    """Two updates from a start that is its own reference: no distance yet in the first, some in the second."""
    run = train_here(
        tmp_path / "run",
        *("run.steps=2", "algorithm.objective=grpo", "batch.dynamic_sampling=false"),
        *("algorithm.kl={coefficient: 0.01, estimator: k3}", "algorithm.entropy_bonus=0.001"),
    )
    first, second = run.metrics()
    for step in (first, second):
        assert step["train/tokens"] == step["rollout/response_tokens"]
    assert abs(first["kl/reference"]) < 1e-9
    assert 1e-6 < second["kl/reference"] < 1


def test_a_mistake_in_the_data_is_a_plain_error_before_weights_are_read(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"problem": "1 2", "answer": null}\n')
    overrides = (
        f"data.train=[{{path: {bad}, verifier: arithmetic}}]",
        "model.path=configs/demo/model",
    )
    run = train_here(tmp_path / "run", *overrides, status=2)
    assert f"error: {bad}" in run.output()
    assert "Loading weights" not in run.output()


def test_overlap_of_training_and_evaluation_is_reported(tmp_path: Path) -> None:
    same = "{path: configs/demo/heldout.jsonl, verifier: arithmetic, limit: 6}"
    text = yaml.safe_dump({"include": str(Path("configs/demo.yaml").resolve())})
    config = tmp_path / "same.yaml"
    config.write_text(text)
    overrides = (f"data.train=[{same}]", f"data.eval=[{same}]", "run.steps=1")
    run = train_here(tmp_path / "run", *overrides, config=str(config))
    assert "6 of 6 evaluation problems are also trained on" in run.output()
