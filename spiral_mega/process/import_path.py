"""Users' own functions, named in a configuration as package.module:function."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any


def load_function(path: str, arguments: int) -> Callable[..., Any]:
    """What `path` names, if it can be called with so many arguments. Raises ValueError that says why it cannot."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError("write package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        raise ValueError(f"it cannot be imported ({type(error).__name__}: {error})") from error
    try:
        inspect.signature(function).bind(*range(arguments))
    except (TypeError, ValueError) as error:
        raise ValueError(f"it does not take {arguments} arguments ({error})") from error
    return function
