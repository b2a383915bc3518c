"""Exact checkpoints by torch.distributed.checkpoint: written in the background, whole or not at all."""

from __future__ import annotations

import json
import logging
import re
import shutil
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from spiral_mega.checkpoint.manifest import HashingWriter, find_damage
from spiral_mega.errors import UserError

log = logging.getLogger(__name__)

_STEP = re.compile(r"step_(\d{6,})")


class CheckpointError(UserError):
    """A checkpoint that cannot be resumed from; the text says why and what to do."""


class CheckpointManager:
    """Checkpoints in `folder`/step_NNNNNN, the newest `keep_last` of them.

    A checkpoint is written under a temporary name and renamed when every rank has written its part, so that a
    folder by the final name is always whole.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = folder, keep_last
        self._main = dist.get_rank() == 0
        self._writing: tuple[int, Future[Any]] | None = None
        # The background write talks among ranks while training does too, so it needs a group of its own.
        self._group = dist.new_group(backend="gloo")
        self._publishing = Lock()

    def latest(self) -> int | None:
        """The step of the newest checkpoint that is as it was written, or None where there are none; collective.

        Newer ones that are damaged are renamed to step_NNNNNN.damaged; what a killed run left half-written is removed.
        Raises CheckpointError if all are damaged: that a run starts from its beginning is for a person to decide.
        """
        if self._main:
            for leftover in self.folder.glob("step_*.partial"):
                log.warning("removing half-written checkpoint %s", leftover)
                shutil.rmtree(leftover)
        steps = [self._steps()]
        dist.broadcast_object_list(steps, src=0)
        damaged: dict[int, str] = {}
        for step in reversed(steps[0]):
            if not (damage := find_damage(self._path(step), self._group)):
                self._set_aside(damaged, step)
                return step
            damaged[step] = damage
        if damaged:
            found = "; ".join(f"{self._path(step)}: {damage}" for step, damage in damaged.items())
            raise CheckpointError(
                f"every checkpoint of this run is damaged ({found}): restore one from a copy, or use another run.dir"
            )
        return None

    def _set_aside(self, damaged: dict[int, str], whole: int) -> None:
        for step, damage in damaged.items() if self._main else ():
            target = self._path(step).with_suffix(".damaged")
            log.warning(
                "checkpoint %s is damaged (%s): it is kept as %s and the run goes on from step %d; "
                "the steps since are done again",
                *(self._path(step), damage, target.name, whole),
            )
            shutil.rmtree(target, ignore_errors=True)
            self._path(step).rename(target)

    def save(self, step: int, state: dict[str, Any], meta: dict[str, Any]) -> None:
        """Start writing `state` (sharded tensors and plain objects) and return; an earlier write is finished first.

        `meta` (world_size, data, config) is small JSON that `read_meta` gives back before the state is loaded.
        """
        self.wait()
        partial = self._path(step).with_suffix(".partial")
        if dist.get_rank() == 0:
            partial.mkdir(parents=True)
            (partial / "meta.json").write_text(json.dumps(meta, indent=1))
        dist.barrier()
        future = async_save(state, storage_writer=HashingWriter(partial), process_group=self._group)
        self._writing = (step, future)  # type: ignore[assignment]
        # At once, and not when the loop next looks: a crash in the next step must not cost a written checkpoint.
        future.add_done_callback(lambda done: None if done.exception() else self._publish(step))  # type: ignore[union-attr]

    def wait(self) -> None:
        """Finish and publish the write in progress; raises what went wrong with it."""
        if self._writing is None:
            return
        (step, future), self._writing = self._writing, None
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise CheckpointError(
                f"checkpoint {self._path(step)} could not be written ({_reasons(error)}): check space and rights of "
                f"{self.folder}; older checkpoints stand"
            ) from error
        self._publish(step)

    def read_meta(self, step: int) -> dict[str, Any]:
        path = self._path(step) / "meta.json"
        try:
            meta: dict[str, Any] = json.loads(path.read_text())
            return {key: meta[key] for key in ("world_size", "data", "config")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): remove {path.parent} to use an older one"
            ) from error

    def load(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Fill `state`, of the shape that `save` was given, from the checkpoint of `step`."""
        try:
            load(state, checkpoint_id=self._path(step), process_group=self._group)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise CheckpointError(
                f"checkpoint {self._path(step)} does not load ({_reasons(error)}): if its files are damaged, remove it "
                "to resume from an older one"
            ) from error
        return state

    def _publish(self, step: int) -> None:
        """Give a written checkpoint its name and remove old ones; rank 0's part, done once.

        Rank 0's future ends after it has gathered word from all ranks and written the metadata.
        """
        with self._publishing:
            final = self._path(step)
            if self._main and final.with_suffix(".partial").exists():
                final.with_suffix(".partial").rename(final)
                for old in map(self._path, self._steps()[: -self.keep_last]):
                    shutil.rmtree(old.rename(old.with_suffix(".partial")))
                log.info("checkpoint %s", final)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _steps(self) -> list[int]:
        names = (_STEP.fullmatch(path.name) for path in self.folder.glob("step_*"))
        return sorted(int(match[1]) for match in names if match)


def _reasons(error: BaseException) -> str:
    """What went wrong on which rank, without the stacks that DCP's own message holds."""
    failures = getattr(error, "failures", {dist.get_rank(): (error, None)})
    return "; ".join(f"rank {rank}: {type(each).__name__}: {each}" for rank, (each, _) in failures.items())
