"""For every test: the repository importable as `tests.*`, one thread per process, no model hub, tools by marker."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

settings.register_profile("untimed", deadline=None)  # a loaded machine fails no test
settings.load_profile("untimed")

LONG = {"test_vllm_engine.py"}  # in addition to the files with runs of the whole trainer


def missing_tool(marker: str) -> str:
    """Return why tests with this marker cannot run here; empty if they can."""
    if marker in ("root", "slurm") and os.geteuid() != 0:
        return "needs root"
    if marker == "slurm" and not (shutil.which("slurmctld") or shutil.which("apt-get")):
        return "needs Slurm: run tools/install_slurm.sh"
    if marker == "browser" and shutil.which(os.environ.get("CHROMIUM", "chromium")) is None:
        return "needs Chromium: run tools/install_browser.sh, or set CHROMIUM"
    if marker == "vllm" and importlib.util.find_spec("vllm") is None:
        return "needs vLLM: run tools/install_cpu.sh"
    if marker == "megatron" and importlib.util.find_spec("megatron") is None:
        return "needs megatron-core: run tools/install_cpu.sh"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose tools are missing; in CI, where the tools are installed, fail them."""
    for marker in item.iter_markers():
        reason = missing_tool(marker.name)
        if reason and os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        elif reason:
            pytest.skip(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, so that short ones fill the end where two files run at a time."""
    slow = {
        item.path for item in items if item.get_closest_marker("slow") or item.path.name in LONG
    }
    items.sort(key=lambda item: item.path not in slow)
