"""A complete configuration from the few keys that a test is about."""

from pathlib import Path
from typing import Any

from spiral_mega.config import Config

SMALLEST: dict[str, dict[str, Any]] = {
    "run": {"dir": "unused", "steps": 10},
    "data": {"train": [{"path": "unused.jsonl"}], "max_prompt_tokens": 16},
    "rollout": {"sampling.max_response_tokens": 16, "sampling.max_context_tokens": 128},
    "policy": {"microbatch_tokens": 128},
    "batch": {"problems": 4},
}


def make_config(folder: Path, /, **sections: dict[str, Any]) -> Config:
    """Build the smallest configuration for the model in `folder`, with the keys of `sections` on top.

    A key may be dotted: `rollout={"sampling.temperature": 0.8}`.
    """
    base = SMALLEST | {"model": {"path": str(folder)}}
    values = {}
    for name in base.keys() | sections.keys():
        values[name] = nested(base.get(name, {}) | sections.get(name, {}))
    return Config.model_validate(values)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into nested dictionaries."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        section = result
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return result
