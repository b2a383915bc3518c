"""What `spiral-mega eval` takes, and what it refuses before anything is loaded."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spiral_mega.cli import app
from spiral_mega.errors import ConfigError
from spiral_mega.evaluate import prepare
from spiral_mega.evaluation.model_source import find_source
from spiral_mega.validation.load import dump_config, load_config

DEMO = "configs/demo.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to evaluate"),
        ([DEMO, "data.eval=[]"], "data.eval is empty"),
        ([DEMO, "--model", "/nowhere"], "there is no such folder"),
        ([DEMO, "--model", "configs"], "no model in Hugging Face form"),
        ([DEMO, "eval.harnesses=[{kind: vote}]"], "eval.harnesses.0"),
        (["--model", "configs/demo/model"], "data.eval"),
        ([DEMO, "--model", "configs/demo/model", "model.path=/other"], "leave one of them out"),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_anything_is_loaded(arguments, message):
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert (result.exit_code, message in result.stderr) == (2, True), result.output


def make_run(folder: Path, *, model: bool, steps: list[int]) -> Path:
    """A run's folder as training leaves it, as far as names go."""
    config = load_config(
        DEMO, [f"run.dir={folder}", "model.lora.rank=4", "rollout.sampling.temperature=0.7"]
    )
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    for step in steps:
        (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step_{step:06d}" / "meta.json").write_text("{}")
    (folder / "checkpoints" / "step_000099.partial").mkdir(parents=True)
    if model:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({}))
    return folder


def test_of_a_run_the_final_model_is_taken_with_the_runs_settings(tmp_path):
    run = make_run(tmp_path / "run", model=True, steps=[40])
    config, source, folder = prepare(None, str(run), None, ["run.seed=5"])
    assert (source.checkpoint, config.model.path, config.model.lora) == (
        None,
        str(run / "model"),
        None,
    )
    assert (config.rollout.sampling.temperature, config.run.seed) == (0.7, 5)
    assert folder == run / "evaluation"


def test_of_an_unfinished_run_the_newest_whole_checkpoint_is_taken_with_its_adapters(tmp_path):
    run = make_run(tmp_path / "run", model=False, steps=[5, 120, 40])
    config, source, folder = prepare(None, str(run), None, [])
    assert source.checkpoint is not None
    assert source.checkpoint.folder == run / "checkpoints" / "step_000120"
    assert config.model.lora is not None
    assert folder == run / "evaluation" / "step_000120"


def test_a_given_configuration_wins_over_the_runs_but_not_for_the_model(tmp_path):
    run = make_run(tmp_path / "run", model=False, steps=[40])
    config, _, folder = prepare(
        Path(DEMO), str(run / "checkpoints" / "step_000040"), tmp_path / "out", []
    )
    assert config.rollout.sampling.temperature == 1.0
    assert config.model.lora is not None
    assert folder == tmp_path / "out"


def test_a_run_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a model nor a checkpoint yet"):
        find_source(str(make_run(tmp_path / "run", model=False, steps=[])), load_config)


def test_weights_that_changed_are_other_weights(tmp_path):
    run = make_run(tmp_path / "run", model=True, steps=[])
    (run / "model" / "model.safetensors").write_bytes(b"1")
    before = find_source(str(run), load_config).identity()
    assert find_source(str(run), load_config).identity() == before
    (run / "model" / "model.safetensors").write_bytes(b"22")
    assert find_source(str(run), load_config).identity() != before
