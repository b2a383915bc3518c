"""What the ranks do for test_plan_memory on megatron-core: real updates, and how far the process grew."""

import gc
from pathlib import Path
from typing import Any

from spiral_mega.packing.sequences import Sequence
from spiral_mega.runtime import Runtime
from tests.plan.memory_job import _status
from tests.support.configs import make_config
from tests.support.megatron_on_cpu import install

install()

from spiral_mega.policy.megatron.policy import MegatronPolicy  # noqa: E402


def peaks(
    runtime: Runtime, argument: tuple[Path, dict[str, tuple[Path, dict[str, Any]]], list[Sequence]]
) -> dict[str, int]:
    """Bytes resident at the most during an update on three micro-batches, over what was before the policy was built."""
    small, cases, sequences = argument
    layout = {"backend": "megatron", "megatron": {"tensor_parallel": 2}}
    policy = MegatronPolicy(make_config(small, policy=layout), runtime)  # loads what any policy needs
    policy.update([sequences[:1]])
    found = {}
    for name, (folder, sections) in cases.items():
        del policy
        gc.collect()
        before = _status("VmRSS")
        policy = MegatronPolicy(make_config(folder, **sections), runtime)
        policy.update([sequences[:1]])
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        policy.update([sequences] * 3)
        found[name] = _status("VmHWM") - before
    return found
