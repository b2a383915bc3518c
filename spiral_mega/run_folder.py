"""The folder of a run: one run at a time, and nothing of an earlier start taken for this one's."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spiral_mega.distributed import gather_objects
from spiral_mega.errors import ConfigError
from spiral_mega.runtime import Runtime

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


def set_aside(folder: Path) -> None:
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
