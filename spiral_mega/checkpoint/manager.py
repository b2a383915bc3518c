"""Exact checkpoints by torch.distributed.checkpoint (DCP), written in the background.

A checkpoint is published complete, by a rename, or not at all:

    checkpoints/
      step_000300.damaged/   found damaged at a start, kept for inspection
      step_000400/           complete
        __0_0.distcp ...     tensors, by rank
        .metadata            DCP's index of all tensors
        meta.json            world size, fingerprint of the data, configuration
        manifest.json        size and SHA-256 of every other file
      step_000500.partial/   being written, or left by a killed run: removed at the next start

    save(500)   meta.json -> tensors, by every rank -> .metadata, manifest.json -> rename
    training    |----------- continues in the meantime -----------------------|
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from spiral_mega.checkpoint.manifest import HashingWriter, find_damage
from spiral_mega.errors import UserError

log = logging.getLogger(__name__)

_STEP = re.compile(r"step_(\d{6,})")


class CheckpointError(UserError):
    """A checkpoint that cannot be written or resumed from; the text says why and what to do."""


class _PendingWrite(NamedTuple):
    step: int
    future: Future[Any]


class CheckpointManager:
    """Checkpoints in `folder`/step_NNNNNN, the newest `keep_last` of them.

    A checkpoint is written under a temporary name and renamed when every rank has written its part,
    so a folder with the final name is always complete.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = folder, keep_last
        self._is_main = dist.get_rank() == 0
        self._pending: _PendingWrite | None = None
        # The background write uses collectives while training does too, so it needs a group of its
        # own.
        self._group = dist.new_group(backend="gloo")
        self._publish_lock = Lock()

    def latest(self) -> int | None:
        """Return the step of the newest undamaged checkpoint, or None if there are none.

        Collective. Newer ones that are damaged are renamed to step_NNNNNN.damaged; half-written
        ones of a killed run are removed. Raises CheckpointError if all are damaged: whether a run
        starts from the beginning is for a person to decide.
        """
        if self._is_main:
            for leftover in self.folder.glob("step_*.partial"):
                log.warning("removing half-written checkpoint %s", leftover)
                shutil.rmtree(leftover)
        steps = [self._steps()]
        dist.broadcast_object_list(steps, src=0)
        damages: dict[int, str] = {}
        for step in reversed(steps[0]):
            damage = find_damage(self._path(step), self._group)
            if not damage:
                if self._is_main:
                    self._set_damaged_apart(damages, step)
                return step
            damages[step] = damage
        if damages:
            found = "; ".join(f"{self._path(step)}: {damage}" for step, damage in damages.items())
            raise CheckpointError(
                f"every checkpoint of this run is damaged ({found}): restore one from a copy, or "
                "use another run.dir"
            )
        return None

    def save(self, step: int, state: dict[str, Any], meta: dict[str, Any]) -> None:
        """Start writing `state` (sharded tensors and plain objects) and return.

        An earlier write is finished first. `meta` (world_size, data, config) is small JSON, which
        `read_meta` returns before the state is loaded.
        """
        self.wait()
        partial = self._path(step).with_suffix(".partial")
        if self._is_main:
            partial.mkdir(parents=True)
            (partial / "meta.json").write_text(json.dumps(meta, indent=1))
        dist.barrier()
        future = async_save(state, storage_writer=HashingWriter(partial), process_group=self._group)
        assert isinstance(future, Future)
        self._pending = _PendingWrite(step, future)
        # Published at once, not at the next `wait`: a crash in the next step must not lose a
        # written checkpoint.
        future.add_done_callback(lambda done: None if done.exception() else self._publish(step))

    def wait(self) -> None:
        """Finish and publish the pending write. Raises CheckpointError if it failed."""
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise CheckpointError(
                f"checkpoint {self._path(step)} could not be written ({_reasons(error)}): check "
                f"space and rights of {self.folder}; older checkpoints are intact"
            ) from error
        self._publish(step)

    def read_meta(self, step: int) -> dict[str, Any]:
        """Read what `save` was given as `meta`. Raises CheckpointError if it cannot be read."""
        path = self._path(step) / "meta.json"
        try:
            meta: dict[str, Any] = json.loads(path.read_text())
            return {key: meta[key] for key in ("world_size", "data", "config")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): remove {path.parent} to use an older one"
            ) from error

    def load(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Fill `state`, structured like the one that was saved, from the checkpoint of `step`.

        Collective.
        """
        try:
            load(state, checkpoint_id=self._path(step), process_group=self._group)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise CheckpointError(
                f"checkpoint {self._path(step)} does not load ({_reasons(error)}): if its files "
                "are damaged, remove it to resume from an older one"
            ) from error
        return state

    def _set_damaged_apart(self, damages: dict[int, str], resumed: int) -> None:
        for step, damage in damages.items():
            path = self._path(step)
            target = path.with_suffix(".damaged")
            log.warning(
                "checkpoint %s is damaged (%s): it is kept as %s and the run resumes from step %d; "
                "the steps since are repeated",
                path,
                damage,
                target.name,
                resumed,
            )
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)

    def _publish(self, step: int) -> None:
        """Rename a written checkpoint to its final name and remove old ones; by rank 0, once.

        Rank 0's future completes after it has heard from all ranks and written the metadata.
        """
        with self._publish_lock:
            final = self._path(step)
            partial = final.with_suffix(".partial")
            if not (self._is_main and partial.exists()):
                return
            partial.rename(final)
            for old in map(self._path, self._steps()[: -self.keep_last]):
                # Not removed under its own name: a run that is killed meanwhile must not find half
                # of it.
                shutil.rmtree(old.rename(old.with_suffix(".partial")))
            log.info("checkpoint %s", final)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _steps(self) -> list[int]:
        matches = (_STEP.fullmatch(path.name) for path in self.folder.glob("step_*"))
        return sorted(int(match[1]) for match in matches if match)


def _reasons(error: BaseException) -> str:
    """Say what failed on which rank, without the stacks in DCP's own message."""
    failures = getattr(error, "failures", {dist.get_rank(): (error, None)})
    return "; ".join(
        f"rank {rank}: {type(each).__name__}: {each}" for rank, (each, _) in failures.items()
    )
