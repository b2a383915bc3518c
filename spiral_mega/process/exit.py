"""How the process of a rank exits."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def skip_teardown() -> Iterator[None]:
    """Exit with `os._exit` after this block and the exit handlers, skipping interpreter teardown.

    A gloo thread may release a tensor a little after the call that used it has returned.
    Interpreter teardown ends that thread in the middle of C++ code, which aborts the process
    (pytorch/pytorch#190489), and a run that had finished would count as failed. Exit handlers run
    in reverse order of registration, so those registered before this block are not reached: enter
    it before importing modules whose handlers matter.
    """
    status = 1  # for any other exception, whose traceback Python prints before the exit handlers

    def exit_process() -> None:
        for stream in filter(
            None, (sys.stdout, sys.stderr)
        ):  # None if it was closed before the start
            stream.flush()  # if this fails, Python continues with its own teardown
        os._exit(status)

    atexit.register(exit_process)
    try:
        yield
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
