"""Import users' functions by path, and large libraries without garbage collection."""

from __future__ import annotations

import gc
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Disable garbage collection during these imports, then freeze the objects that they created.

    The trainer's imports create 660,000 objects that live to the end. Searching them for garbage
    took an eighth of the CPU time of a process that starts and makes one step of the demo.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def load_function(path: str, num_arguments: int) -> Callable[..., Any]:
    """Import the function that a configuration names as package.module:function.

    Raises ValueError, saying why, when it cannot be imported or called with `num_arguments`
    arguments.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError("write package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        raise ValueError(f"it cannot be imported ({type(error).__name__}: {error})") from error
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except (TypeError, ValueError) as error:
        raise ValueError(f"it does not take {num_arguments} arguments ({error})") from error
    return function
