"""A whole configuration around the few keys that a test is about."""

from pathlib import Path
from typing import Any

from spiral_mega.config import Config


def make_config(folder: Path, /, **sections: dict[str, Any]) -> Config:
    """The smallest configuration for the model in `folder`, with the keys of `sections` on top."""
    smallest: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused", "steps": 10},
        "model": {"path": str(folder)},
        "data": {"train": [{"path": "unused.jsonl"}], "max_prompt_tokens": 16},
        "rollout": {"max_response_tokens": 16, "max_context_tokens": 128},
        "policy": {"microbatch_tokens": 128},
        "batch": {"problems": 4},
    }
    names = smallest.keys() | sections.keys()
    return Config.model_validate({name: smallest.get(name, {}) | sections.get(name, {}) for name in names})
