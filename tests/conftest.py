"""For every test: the repository importable as `tests.*`, one thread a process, and no model hub."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

settings.register_profile("untimed", deadline=None)  # a loaded machine fails no test
settings.load_profile("untimed")


LONG = {"test_vllm_engine.py"}  # beside the files with runs of the whole trainer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: what is short fills the end, where two files run at a time."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.path.name in LONG}
    items.sort(key=lambda item: item.path not in slow)
