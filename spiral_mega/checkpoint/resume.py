"""Decide whether a run may resume from a checkpoint, and restore its policies.

A run resumes with the same training problems and the same settings of everything that decided what
was learned. Other settings may change, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from spiral_mega.checkpoint.manager import CheckpointError, CheckpointManager
from spiral_mega.config import Config
from spiral_mega.errors import ConfigError
from spiral_mega.policy import Policy

log = logging.getLogger(__name__)

# Changes of these cannot be applied: the checkpoint holds their result (weights, adapters, moments,
# learning rates, positions).
FIXED = ("run.seed", "model", "two_models", "algorithm", "optimizer", "batch.minibatches")


def find_resumable(
    checkpoints: CheckpointManager,
    config: Config,
    data: str,
    world_size: int,
) -> int | None:
    """Return the step to resume from, or None to start from the beginning. Collective.

    `data` is the fingerprint of the training problems. Raises ConfigError or CheckpointError if
    there is a checkpoint that this run must not resume from.
    """
    latest = checkpoints.latest()
    if latest is None:
        return None
    if config.run.resume == "never":
        raise ConfigError(
            f"run.dir {config.run.dir} holds checkpoints and run.resume is 'never': set "
            "run.resume=auto, or use another run.dir"
        )
    meta = checkpoints.read_meta(latest)
    changes = describe_changes(meta["config"], config.model_dump(mode="json"))
    _check_fixed_settings(changes, config)
    _check_problems(meta["data"], data, config)
    if changes:
        log.warning("resuming with changes: %s", "; ".join(changes))
    if meta["world_size"] != world_size:
        log.warning(
            "resuming on %d ranks a run of %d: results will not be the same bit for bit",
            world_size,
            meta["world_size"],
        )
    return latest


def _check_fixed_settings(changes: list[str], config: Config) -> None:
    fixed = [change for change in changes if change.startswith(FIXED)]
    if fixed:
        raise CheckpointError(
            f"this configuration differs from that of the run in {config.run.dir}: "
            f"{'; '.join(fixed)}. Set it back, or start another run.dir"
        )


def _check_problems(saved: str, current: str, config: Config) -> None:
    """Compare the fingerprints of the training problems, saved and current."""
    if saved == current:
        return
    accepted = f"sha256:{current[:16]}"
    if config.data.accept_fingerprint != accepted:
        raise CheckpointError(
            "the training problems are not those of the checkpoint (another file, filter or "
            "order): restore them, start another run.dir, or resume with the new ones from their "
            f"beginning by data.accept_fingerprint={accepted}"
        )
    log.warning(
        "the training problems have changed, as data.accept_fingerprint allows: they are read from "
        "their beginning"
    )


def describe_changes(old: Any, new: Any, key: str = "") -> list[str]:
    """List every key of nested dicts whose value differs, as "key was old and is new"."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{key} was {old!r} and is {new!r}"]
    changes = []
    for name in dict.fromkeys([*old, *new]):
        changes += describe_changes(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    return changes


def policy_states(policies: Mapping[str, Policy]) -> dict[str, Any]:
    """Return the states of a run's policies, by their keys in a checkpoint: `policy`, or `policy_search` and so on."""
    return {_state_key(model): policy.state_dict() for model, policy in policies.items()}


def load_policies(policies: Mapping[str, Policy], state: dict[str, Any]) -> None:
    """Load into each policy its part of a checkpoint's `state`."""
    for model, policy in policies.items():
        policy.load_state_dict(state[_state_key(model)])


def _state_key(model: str) -> str:
    return f"policy_{model}" if model else "policy"
