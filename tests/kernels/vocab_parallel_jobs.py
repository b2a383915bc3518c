"""Functions that the ranks run for the tests of sharded vocabularies, under torchrun."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from spiral_mega.distributed.runtime import Runtime
from tests.kernels.cases import Case, Tensors, computed

SHARDED = ("weight", "bias", "adapter_weight")


def run_cases(
    runtime: Runtime, cases: dict[str, tuple[Case, Tensors, list[int] | None]]
) -> dict[str, Any]:
    """Run every case: its tensors, and the sizes of the shards (None: equal ones, the last padded)."""
    return {name: run_case(runtime, *case) for name, case in cases.items()}


def run_case(
    runtime: Runtime, case: Case, tensors: Tensors, sizes: list[int] | None
) -> dict[str, Any]:
    rank, world_size, more = runtime.rank, runtime.world_size, {}
    if sizes is None:
        size = 5 + -(
            -case.V // world_size
        )  # padding at every end: real entries stop within or before a shard
        start = rank * size
        more["vocab_size"] = case.V
    else:
        size, start = sizes[rank], sum(sizes[:rank])
        more["vocab_start"] = start
    local = tensors | {
        name: _shard(tensors[name], start, size) for name in SHARDED if name in tensors
    }
    exchanged: list[int] = []
    all_reduce = dist.all_reduce

    def watched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        exchanged.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", watched):
        found = computed(local, case, vocab_parallel_group=dist.group.WORLD, **more)
    real = max(0, min(case.V - start, size))
    padding = {name: found[name][real:] for name in SHARDED if name in found}
    found |= {name: found[name][:real] for name in SHARDED if name in found}
    return {"found": found, "padding": padding, "exchanged": exchanged}


def _shard(whole: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """Take a shard, padded with values that would show in any sum they entered."""
    return torch.cat(
        [whole[start : start + size], torch.full((size, *whole.shape[1:]), 1e3).to(whole)]
    )[:size]
