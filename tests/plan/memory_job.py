"""What the ranks do for test_plan_memory: real updates, and how far the process grew."""

import gc
from pathlib import Path
from typing import Any

from spiral_mega.packing.sequences import Sequence
from spiral_mega.policy.fsdp.policy import FsdpPolicy
from spiral_mega.runtime import Runtime
from tests.support.configs import make_config


def peaks(
    runtime: Runtime, argument: tuple[Path, dict[str, tuple[Path, dict[str, Any]]], list[Sequence]]
) -> dict[str, int]:
    """Bytes resident at the most during an update on the sequences, over what was before the policy was built."""
    small, cases, sequences = argument
    policy = FsdpPolicy(make_config(small), runtime)  # loads what any policy needs
    policy.update([sequences[:1]])
    found = {}
    for name, (folder, sections) in cases.items():
        del policy
        gc.collect()
        before = _status("VmRSS")
        policy = FsdpPolicy(make_config(folder, **sections), runtime)
        policy.update([sequences[:1]])
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        policy.update([sequences])
        found[name] = _status("VmHWM") - before
    return found


def _status(key: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":")]
    return 1024 * int(line.split()[1])
