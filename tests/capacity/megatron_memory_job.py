"""What the ranks do for test_plan_memory on megatron-core."""

from spiral_mega.distributed.runtime import Runtime
from tests.capacity.memory_job import Argument, peaks_of
from tests.support.configs import make_config
from tests.support.megatron_on_cpu import install

install()

from spiral_mega.policy.megatron.megatron_policy import MegatronPolicy  # noqa: E402


def peaks(runtime: Runtime, argument: Argument) -> dict[str, int]:
    """As on FSDP2, in an update of three micro-batches."""
    small, cases, sequences = argument
    smallest = make_config(
        small, policy={"backend": "megatron", "megatron": {"tensor_parallel": 2}}
    )
    return peaks_of(
        lambda config: MegatronPolicy(config, runtime), smallest, cases, [sequences] * 3
    )
