"""A multiprocessing context whose processes do not import the caller's main module."""

from __future__ import annotations

import sys
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from threading import Lock
from types import ModuleType
from typing import Any

_lock = Lock()


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        with _lock:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                sys.modules["__main__"] = main


class MainlessContext(SpawnContext):
    """multiprocessing's spawn, except that children do not run the parent's script again.

    A trainer's script imports torch (seconds, and gigabytes of address space) and may lack an `if
    __name__ == "__main__"`. spawn passes the main module's file to the child; here it finds an
    empty module.
    """

    Process = _Process
