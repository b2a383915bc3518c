"""What the ranks do for test_plan_memory: real updates, and how far the process grew."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spiral_mega.config import Config
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.packing.training_sequence import TrainingSequence
from spiral_mega.policy.fsdp.fsdp_policy import FsdpPolicy
from tests.support.configs import make_config

Argument = tuple[Path, dict[str, tuple[Path, dict[str, Any]]], list[TrainingSequence]]


def peaks(runtime: Runtime, argument: Argument) -> dict[str, int]:
    """Bytes resident at the most during an update on the sequences, over what was before the policy was built."""
    small, cases, sequences = argument
    return peaks_of(
        lambda config: FsdpPolicy(config, runtime), make_config(small), cases, [sequences]
    )


def peaks_of(
    build: Callable[[Config], Any],
    smallest: Config,
    cases: dict[str, tuple[Path, dict[str, Any]]],
    batch: list[list[TrainingSequence]],
) -> dict[str, int]:
    """As `peaks`, for the policies that `build` makes; that of `smallest` loads what any policy needs."""
    policy = build(smallest)
    policy.update([batch[0][:1]])
    found = {}
    for name, (folder, sections) in cases.items():
        del policy
        gc.collect()
        before = _status("VmRSS")
        policy = build(make_config(folder, **sections))
        policy.update([batch[0][:1]])
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        policy.update(batch)
        found[name] = _status("VmHWM") - before
    return found


def _status(key: str) -> int:
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(key + ":")
    ]
    return 1024 * int(line.split()[1])
