"""Stage times and peak memory of this process, as metrics."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spiral_mega.process.heartbeat import heartbeat

GIB = 1024**3


class StageTimer:
    """Accumulates the wall-clock seconds of each stage of a step.

    `synchronize` is called before a stage's end is timed: with `torch.cuda.synchronize`, queued
    kernels count for the stage that queued them.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize or (lambda: None)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time the block as `stage`. Stages may nest; each includes the time of stages inside it.

        A block that raises counts too.
        """
        start = time.perf_counter()
        heartbeat(stage)
        try:
            yield
            self._synchronize()
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call, as time/<stage>."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{stage}": value for stage, value in seconds.items()}


def memory_metrics() -> dict[str, float]:
    """Return the peaks since the process started, in GiB: resident memory, and CUDA memory on a GPU."""
    import torch

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    metrics = {
        "memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
    }
    if torch.cuda.is_available():
        metrics["memory/peak_cuda_gib"] = torch.cuda.max_memory_allocated() / GIB
        metrics["memory/peak_cuda_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return metrics
