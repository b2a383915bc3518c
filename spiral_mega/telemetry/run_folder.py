"""The folder of a run: locked by one run at a time, its status, and archives of earlier starts."""

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

# Files of an earlier start to which a start from step 0 would otherwise append: metrics, tracker
# state, traces.
RECORDS = ("metrics.jsonl", "trackers", "traces", "curves.png")


@contextmanager
def locked_folder(folder: Path, runtime: Runtime) -> Iterator[None]:
    """Create `folder` and lock it for this run; collective.

    Raises ConfigError on every rank when another run holds the lock.
    """
    problem, lock = "", None
    if runtime.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = (
                f"run.dir {folder} is in use by another run: wait for it, or choose another folder"
            )
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
    """Record user-fixable errors in status.json, so that launchers do not retry the run."""
    try:
        yield
    except UserError as error:
        if runtime.is_main:
            with suppress(OSError):  # the error may be that the disk is full
                set_status(folder, "failed", error=str(error))
        raise


def set_status(folder: Path, state: str, step: int | None = None, **more: str) -> None:
    """Write the state of the run after `step` steps (None: as recorded before) to status.json."""
    if step is None:
        step = read_status(folder).get("step", 0)
    write_json_atomic(folder / "status.json", {"state": state, "step": step, **more})


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of status.json; {} if there is none yet."""
    try:
        status: dict[str, Any] = json.loads((folder / "status.json").read_text())
        return status
    except (OSError, ValueError):
        return {}


def archive_previous(folder: Path) -> None:
    """Move the records of an earlier start in `folder`, if any, to folder/earlier/N."""
    found = [folder / name for name in RECORDS if (folder / name).exists()]
    if not found:
        return
    number = 1 + max((int(path.name) for path in (folder / "earlier").glob("[0-9]*")), default=0)
    target = folder / "earlier" / str(number)
    target.mkdir(parents=True)
    for path in found:
        path.rename(target / path.name)
    log.warning(
        "this run starts from step 0: the records of an earlier start were moved to %s", target
    )
