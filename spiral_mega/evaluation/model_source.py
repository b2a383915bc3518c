"""What `--model` may name: a model in Hugging Face form, a run, or a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spiral_mega.checkpoint.manager import CheckpointManager
from spiral_mega.checkpoint.resume import load_policies, policy_states
from spiral_mega.config import Config
from spiral_mega.config.model_set import model_configs
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import ConfigError
from spiral_mega.models.weights import pretrained_weights
from spiral_mega.policy import build_policies
from spiral_mega.rollout import RolloutEngine

WEIGHT_FILES = (
    "*.safetensors",
    "*.bin",
    "*.gguf",
    "config.json",
    "meta.json",
    ".metadata",
    "*.distcp",
)


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint `folder` (checkpoints/step_N) of a run, and the configuration of the run."""

    folder: Path
    run: Config

    @property
    def step(self) -> int:
        return int(self.folder.name.removeprefix("step_"))


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the weights to evaluate come from.

    checkpoint: a run's checkpoint; None: the model in Hugging Face form at `path`. run_config: the
    configuration file of the run that made the weights; None where no run is known.
    """

    path: str
    run_config: Path | None = None
    checkpoint: RunCheckpoint | None = None

    def required_values(self) -> dict[str, Any]:
        """Return the configuration values that this source requires, whatever the file says."""
        rollout = {
            "engine": {"sleep": False},
            "sync": {"lora": "merge"},
            "record": {"write": None, "read": None},
        }
        if self.checkpoint is not None:  # the architecture that the checkpoint fits
            run = self.checkpoint.run.model_dump(mode="json")
            return {"rollout": rollout, "model": run["model"], "two_models": run["two_models"]}
        model = {"path": self.path, "tokenizer": None, "lora": None}
        return {"rollout": rollout, "model": model, "two_models": None}

    def load_weights(
        self, engines: Mapping[str, RolloutEngine], config: Config, runtime: Runtime
    ) -> None:
        """Load each model's full weights, with adapters merged, into its engine. Collective."""
        if self.checkpoint is None:
            for model, model_config in model_configs(config).items():
                engines[model].load_weights(pretrained_weights(model_config.model.path))
            return
        run = self.checkpoint.run
        policies, frozen = build_policies(run, runtime)
        checkpoints = CheckpointManager(self.checkpoint.folder.parent, run.checkpoint.keep_last)
        load_policies(policies, checkpoints.load(self.checkpoint.step, policy_states(policies)))
        dtype = getattr(torch, config.policy.param_dtype)
        for model, policy in {**policies, **frozen}.items():
            engines[model].load_weights(policy.weights(dtype))

    def identity(self) -> dict[str, Any]:
        """Return what identifies these weights unread: path, sizes and times of their files."""
        folder = self.checkpoint.folder if self.checkpoint is not None else Path(self.path)
        files: set[Path] = set()
        if folder.is_dir():
            for pattern in WEIGHT_FILES:
                files.update(folder.glob(pattern))
        stats = {
            path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(files)
        }
        return {"path": str(folder.resolve()) if files else self.path, "files": stats}


def find_source(path: str, load_config: Callable[[Path], Config]) -> ModelSource:
    """Find what is at `path`; of a run, take its final model, or else its newest checkpoint.

    A path that does not exist is taken for a hub name, unless it looks like a path. Raises
    ConfigError if it is nothing that can be evaluated.
    """
    folder = Path(path)
    if not folder.exists():
        if folder.is_absolute() or path.startswith(".") or path.count("/") > 1:
            raise ConfigError(f"--model {path}: there is no such folder")
        return ModelSource(path)
    if folder.name.startswith("step_") and (folder / "meta.json").is_file():
        run_config = folder.parent.parent / "config.yaml"
        return ModelSource(path, run_config, RunCheckpoint(folder, load_config(run_config)))
    if (folder / "config.yaml").is_file():
        return _find_in_run(folder, load_config)
    if (folder / "config.json").is_file():
        return ModelSource(path)
    raise ConfigError(
        f"--model {path}: no model in Hugging Face form (config.json), no run (config.yaml), and "
        "no checkpoint of a run (meta.json)"
    )


def _find_in_run(folder: Path, load_config: Callable[[Path], Config]) -> ModelSource:
    run_config = folder / "config.yaml"
    if (folder / "model" / "config.json").is_file():
        return ModelSource(str(folder / "model"), run_config)
    checkpoints = {}
    for path in (folder / "checkpoints").glob("step_*"):
        step = path.name.removeprefix("step_")
        if step.isdigit() and (path / "meta.json").is_file():
            checkpoints[int(step)] = path
    if not checkpoints:
        raise ConfigError(f"--model {folder}: the run has neither a model nor a checkpoint yet")
    newest = checkpoints[max(checkpoints)]
    return ModelSource(str(folder), run_config, RunCheckpoint(newest, load_config(run_config)))
