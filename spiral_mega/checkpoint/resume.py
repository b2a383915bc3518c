"""Whether a run may go on from a checkpoint: the same problems, and the same of all that decides what was learnt."""

from __future__ import annotations

import logging
from typing import Any

from spiral_mega.checkpoint.manager import CheckpointError, CheckpointManager
from spiral_mega.config import Config
from spiral_mega.errors import ConfigError

log = logging.getLogger(__name__)

# A checkpoint cannot take these on: it holds their result (weights, adapters, moments, learning rates, positions).
FIXED = ("run.seed", "model", "two_models", "algorithm", "optimizer", "batch.minibatches")


def find_resumable(checkpoints: CheckpointManager, config: Config, data: str, world_size: int) -> int | None:
    """The step to resume from, or None to start afresh; collective. `data` is the training problems' fingerprint.

    Raises ConfigError or CheckpointError if there is a checkpoint that this run must not go on from.
    """
    latest = checkpoints.latest()
    if latest is None:
        return None
    if config.run.resume == "never":
        raise ConfigError(
            f"run.dir {config.run.dir} holds checkpoints and run.resume is 'never': set run.resume=auto, or use "
            "another run.dir"
        )
    meta = checkpoints.read_meta(latest)
    changed = changes(meta["config"], config.model_dump(mode="json"))
    fixed = [change for change in changed if change.startswith(FIXED)]
    if fixed:
        raise CheckpointError(
            f"this configuration differs from that of the run in {config.run.dir}: {'; '.join(fixed)}. Set it back, or "
            "start another run.dir"
        )
    if meta["data"] != data:
        if config.data.accept_fingerprint != (name := f"sha256:{data[:16]}"):
            raise CheckpointError(
                "the training problems are not those of the checkpoint (another file, filter or order): restore them, "
                "start another run.dir, or go on with the new ones from their beginning by "
                f"data.accept_fingerprint={name}"
            )
        log.warning(
            "the training problems have changed, as data.accept_fingerprint allows: they are drawn from their beginning"
        )
    if changed:
        log.warning("resuming with changes: %s", "; ".join(changed))
    if meta["world_size"] != world_size:
        log.warning(
            "resuming on %d ranks a run of %d: it goes on, but not bit for bit as before",
            world_size,
            meta["world_size"],
        )
    return latest


def changes(old: Any, new: Any, key: str = "") -> list[str]:
    """Every key whose value differs, as "key was old and is new"."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        nested = (changes(old.get(name), new.get(name), f"{key}.{name}" if key else name) for name in names)
        return [change for changes in nested for change in changes]
    return [] if old == new else [f"{key} was {old!r} and is {new!r}"]
