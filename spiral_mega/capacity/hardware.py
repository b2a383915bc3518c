"""GPUs by name, from the makers' data sheets, and the shares of their peaks that forecasts count on."""

from __future__ import annotations

from dataclasses import dataclass

from spiral_mega.simulation.workload import Gpu

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU and its links: bytes, bytes/s, dense bfloat16 FLOP/s. Links are per GPU and per direction."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    node_link: float  # NVLink within a node
    network: float  # InfiniBand or Ethernet between nodes
    node_gpus: int = 8

    @property
    def gpu(self) -> Gpu:
        """Return the GPU as the rollout simulator takes it."""
        return Gpu(memory=self.memory, bandwidth=self.bandwidth, flops=self.flops)


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("a100-80", 80 * GIB, 2.04e12, 312e12, 300e9, 25e9),
        Machine("h100-80", 80 * GIB, 3.35e12, 989e12, 450e9, 50e9),
        Machine("h200", 141e9, 4.8e12, 989e12, 450e9, 50e9),
        Machine("b200", 180e9, 8.0e12, 2250e12, 900e9, 50e9),
    )
}
# Shares of the peaks. Assumptions, not measurements: nothing of this project has been timed on a
# GPU yet.
TRAINING_SHARE = 0.40  # of FLOP/s, over a whole micro-batch
LINK_SHARE = 0.7
MEMORY_SHARE = 0.8
# Held by a process outside torch's tensors: CUDA context, NCCL buffers, cuBLAS workspaces.
CONTEXT_BYTES = 2.0 * GIB
# Reserved by torch's allocator but unusable, as a share of the trainer's tensors.
FRAGMENTATION = 0.08
# vLLM's activations and CUDA graphs.
ENGINE_OVERHEAD = 3.0 * GIB
