"""What `--model` may name: a model in Hugging Face form, a run's folder, or one of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spiral_mega.checkpoint.manager import CheckpointManager
from spiral_mega.checkpoint.policy_states import load_policies, policy_states
from spiral_mega.config import Config
from spiral_mega.config.model_set import model_configs
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import ConfigError
from spiral_mega.models.weights import pretrained_weights
from spiral_mega.policy import build_policies
from spiral_mega.rollout import RolloutEngine
from spiral_mega.validation.load import load_config

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "config.json", "meta.json", ".metadata", "*.distcp")


@dataclass(frozen=True, slots=True)
class Target:
    """Where weights come from. `checkpoint` is a step's folder of the run whose configuration is `run_config`; without
    one, the weights are those of the model in Hugging Face form at `model`."""

    model: str
    run_config: Path | None = None
    checkpoint: Path | None = None

    def values(self) -> dict[str, Any]:
        """What the configuration of an evaluation of this says, whatever its file does."""
        sampling: dict[str, Any] = {
            "rollout": {
                "engine": {"sleep": False},
                "sync": {"lora": "merge"},
                "record": {"write": None, "read": None},
            }
        }
        if self.checkpoint is not None:  # the architecture that the checkpoint fits
            run = self._run().model_dump(mode="json")
            return sampling | {"model": run["model"], "two_models": run["two_models"]}
        return sampling | {"model": {"path": self.model, "tokenizer": None, "lora": None}, "two_models": None}

    def load(self, engines: Mapping[str, RolloutEngine], config: Config, runtime: Runtime) -> None:
        """Give each model's engine its whole weights, adapters merged; collective."""
        if self.checkpoint is None:
            for model, each in model_configs(config).items():
                engines[model].load_weights(pretrained_weights(each.model.path))
            return
        run = self._run()
        policies, frozen = build_policies(run, runtime)
        checkpoints = CheckpointManager(self.checkpoint.parent, run.checkpoint.keep_last)
        step = int(self.checkpoint.name.removeprefix("step_"))
        load_policies(policies, checkpoints.load(step, policy_states(policies)))
        for model, policy in {**policies, **frozen}.items():
            engines[model].load_weights(policy.weights(getattr(torch, config.policy.param_dtype)))

    def identity(self) -> dict[str, Any]:
        """What tells these weights from others, without reading them: path, sizes and times of their files."""
        folder = self.checkpoint or Path(self.model)
        files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)}) if folder.is_dir() else []
        stats = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
        return {"path": str(folder.resolve()) if files else self.model, "files": stats}

    def _run(self) -> Config:
        assert self.run_config is not None
        return load_config(self.run_config)


def find_target(path: str) -> Target:
    """What is at `path`; of a run its final model or else its newest checkpoint. Raises ConfigError if it is nothing.

    A path that does not exist is taken for the name of a model on a hub, unless it looks like a path.
    """
    folder = Path(path)
    if not folder.exists():
        if folder.is_absolute() or path.startswith(".") or path.count("/") > 1:
            raise ConfigError(f"--model {path}: there is no such folder")
        return Target(path)
    if (folder / "meta.json").is_file() and folder.name.startswith("step_"):
        return Target(path, folder.parent.parent / "config.yaml", folder)
    if (folder / "config.yaml").is_file():
        if (folder / "model" / "config.json").is_file():
            return Target(str(folder / "model"), folder / "config.yaml")
        steps = sorted(path for path in (folder / "checkpoints").glob("step_*") if (path / "meta.json").is_file())
        steps = [path for path in steps if path.name.removeprefix("step_").isdigit()]
        if steps:
            return Target(path, folder / "config.yaml", max(steps, key=lambda each: int(each.name[5:])))
        raise ConfigError(f"--model {path}: the run has neither a model nor a checkpoint yet")
    if (folder / "config.json").is_file():
        return Target(path)
    raise ConfigError(
        f"--model {path}: no model in Hugging Face form (config.json), no run (config.yaml), and no "
        "checkpoint of a run (meta.json)"
    )
