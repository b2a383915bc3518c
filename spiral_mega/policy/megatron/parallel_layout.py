"""megatron-core's process groups, and this rank's place in them.

With 8 ranks, tensor_parallel 2 and pipeline_parallel 2 there are two replicas:

              replica 0    replica 1
    stage 0   ranks 0, 1   ranks 2, 3
    stage 1   ranks 4, 5   ranks 6, 7
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from spiral_mega.config import MegatronConfig
from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.errors import UserError


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """This rank's place among those that share a replica of the model, and among the replicas.

    A replica is tensor_parallel x context_parallel x pipeline_parallel ranks that work on the same
    micro-batches. Experts are spread over expert_parallel ranks of a stage, each expert whole,
    whatever tensor_parallel is.
    """

    tensor_rank: int
    tensor_size: int
    context_rank: int
    context_size: int
    expert_rank: int
    expert_size: int
    first_stage: bool
    last_stage: bool
    replica: int
    replica_group: dist.ProcessGroup  # the ranks of this replica

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def context_group(self) -> dist.ProcessGroup:
        return parallel_state.get_context_parallel_group()

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank is the one of its replica that has the loss and counts it."""
        return self.last_stage and self.tensor_rank == self.context_rank == 0


def init_layout(config: MegatronConfig, seed: int) -> ParallelLayout:
    """Create the process groups, after destroying those of an earlier layout in this process.

    Collective. Raises UserError without a GPU.
    """
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    try:
        torch.empty(0, device=torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"policy.backend is 'megatron', and megatron-core computes on GPUs only ({error}): use "
            "policy.backend=fsdp here; its tests and the demo run it on CPU by python -m "
            "tests.support.megatron_on_cpu (docs/design/megatron.md)"
        ) from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.virtual_stages
        if config.virtual_stages > 1
        else None,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed % 2**31
    )  # its layers draw from it, though dropout is off
    replica = parallel_state.get_data_parallel_rank()
    return ParallelLayout(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        first_stage=parallel_state.is_pipeline_first_stage(),
        last_stage=parallel_state.is_pipeline_last_stage(),
        replica=replica,
        replica_group=_replica_group(replica),
    )


def _replica_group(replica: int) -> dist.ProcessGroup:
    """Create a group of the ranks that have the same `replica` number. Collective."""
    members: dict[int, list[int]] = {}
    for rank, each in enumerate(gather_objects(replica)):
        members.setdefault(each, []).append(rank)
    own_group, _ = dist.new_subgroups_by_enumeration(list(members.values()))  # type: ignore[no-untyped-call]
    return own_group
