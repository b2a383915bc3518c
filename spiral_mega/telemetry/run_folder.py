"""The folder of a run: one run at a time, and nothing of an earlier start taken for this one's."""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import ConfigError, UserError
from spiral_mega.telemetry import write_json_atomic

log = logging.getLogger(__name__)

# What a start from step 0 would otherwise go on with: records, what trackers have read of them, traces.
RECORDS = ("metrics.jsonl", "trackers", "traces", "curves.png")


@contextmanager
def locked_folder(folder: Path, runtime: Runtime) -> Iterator[None]:
    """Make `folder` and hold it for this run; collective. Raises ConfigError on every rank when another run has it."""
    problem, lock = "", None
    if runtime.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"run.dir {folder} is in use by another run: wait for it, or choose another folder"
        except OSError as error:
            problem = f"run.dir {folder} cannot be used ({error.strerror}): choose another folder"
    try:
        if problem := gather_objects(problem)[0]:
            raise ConfigError(problem)
        yield
    finally:
        if lock is not None:
            lock.close()


@contextmanager
def record_failure(folder: Path, runtime: Runtime) -> Iterator[None]:
    """Tell in status.json of an error that a person has to mend, so that no launcher starts the same run again."""
    try:
        yield
    except UserError as error:
        if runtime.is_main:
            with suppress(OSError):  # the disk may be what is full
                set_status(folder, "failed", error=str(error))
        raise


def set_status(folder: Path, state: str, step: int | None = None, **more: str) -> None:
    """Tell in status.json how the run stands, after `step` updates (None: as told before)."""
    if step is None:
        step = read_status(folder).get("step", 0)
    write_json_atomic(folder / "status.json", {"state": state, "step": step, **more})


def read_status(folder: Path) -> dict[str, Any]:
    """What status.json says; {} where there is none yet."""
    try:
        status: dict[str, Any] = json.loads((folder / "status.json").read_text())
        return status
    except (OSError, ValueError):
        return {}


def archive_previous(folder: Path) -> None:
    """Move the records of an earlier start in `folder`, if there are any, to folder/earlier/N."""
    found = [folder / name for name in RECORDS if (folder / name).exists()]
    if not found:
        return
    number = 1 + max((int(path.name) for path in (folder / "earlier").glob("[0-9]*")), default=0)
    target = folder / "earlier" / str(number)
    target.mkdir(parents=True)
    for path in found:
        path.rename(target / path.name)
    log.warning("this run starts anew: the records of an earlier start were moved to %s", target)
