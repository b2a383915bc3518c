"""How a rank's process ends."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def skip_teardown() -> Iterator[None]:
    """The process ends after what is done within, by its exit handlers and with its status, but Python stays whole.

    A thread of gloo's may let go of a tensor a little later than the call it served returns. Once Python is being torn
    down, that ends the thread in the midst of C++ code, which aborts the process (pytorch/pytorch#190489): a run that
    had finished would count as failed. Exit handlers run last come first, so those registered before this are not
    reached: enter it before modules are imported that register some which matter.
    """
    status = 1  # of any other exception, whose traceback Python prints before its exit handlers

    def end() -> None:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed before the start
            stream.flush()  # should this fail, Python goes on to end as it does of its own
        os._exit(status)

    atexit.register(end)
    try:
        yield
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
