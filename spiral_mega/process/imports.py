"""Imports of large libraries, without looking for garbage in them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Around imports: what they make is never looked through for garbage, neither meanwhile nor later.

    That is 660,000 objects for the trainer, which stay to the end. Looking through them took an eighth of the CPU time
    of a process that starts and makes one step of the demo.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
