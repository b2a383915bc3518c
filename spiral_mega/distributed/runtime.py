"""The runtime: the one place that chooses device, communication backend and attention."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import is_flash_attn_2_available

from spiral_mega.distributed.row_gather import RowGatherer
from spiral_mega.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """This process: its rank, the number of ranks, its device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def choose_attention(self, dtype: torch.dtype, setting: str = "auto") -> str:
        """Return the tree attention to use: `setting`, or for "auto" the one that suits device and
        dtype.

        Raises UserError when `setting` cannot run here.
        """
        cuda = self.device.type == "cuda"
        half = dtype in (torch.bfloat16, torch.float16)
        flash = cuda and half and is_flash_attn_2_available()
        if setting == "auto":
            if cuda and half and not flash:
                log.warning(
                    "flash-attn is not installed: token trees use FlexAttention, which is slower"
                )
            if flash:
                return "tree_varlen"
            return "tree_flex" if cuda else "tree_torch"
        if setting == "tree_varlen" and not flash:
            raise UserError(
                "policy.attention is 'tree_varlen', which needs a GPU, flash-attn and bfloat16: use auto"
            )
        if setting == "tree_flex" and not cuda:
            raise UserError(
                "policy.attention is 'tree_flex', which has no backward pass without a GPU: use auto"
            )
        return setting

    def vllm_options(self, *, sleep: bool) -> dict[str, Any]:
        """Return vLLM's options for running on this device next to the policy, with a KV cache of a
        given size.

        On GPU, a low gpu_memory_utilization: by default vLLM refuses to start unless most of the
        memory is free. Its CPU build has no CUDA graphs, and cannot rewind a seeded generator after
        a prompt that was prefilled in chunks.
        """
        if self.device.type == "cuda":
            return {
                "enable_chunked_prefill": True,
                "gpu_memory_utilization": 0.01,
                "enable_sleep_mode": sleep,
            }
        return {"enable_chunked_prefill": False, "enforce_eager": True}

    def row_gatherer(self) -> RowGatherer:
        """Return a gatherer of row-sharded tensors over all ranks."""
        group = dist.group.WORLD
        assert group is not None
        return RowGatherer(group)

    def empty_cache(self) -> None:
        """Return cached memory of torch to the device, so that other libraries can allocate it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work, so that a clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _read_ranks() -> tuple[int, int, int]:
    """Return rank, world size and local rank from the launcher's variables; without them, those of a single process."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    values = {name: os.environ.get(name, default) for name, default in defaults.items()}
    try:
        rank, world_size, local_rank = (int(value) for value in values.values())
    except ValueError:
        raise UserError(
            f"the environment has {values}: start ranks with torchrun, which sets these numbers"
        ) from None
    if not 0 <= rank < world_size:
        raise UserError(
            f"the environment has {values}: RANK must be below WORLD_SIZE; start ranks with torchrun"
        )
    if "WORLD_SIZE" in os.environ and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise UserError(
            "WORLD_SIZE is set without MASTER_ADDR and MASTER_PORT: start ranks with torchrun, or unset it"
        )
    if world_size > 1 and rank == 0:
        print(f"waiting for {world_size} ranks", file=sys.stderr, flush=True)
    return rank, world_size, local_rank


@contextmanager
def start_runtime(*, timeout_minutes: float = 30.0) -> Iterator[Runtime]:
    """Join the process group that torchrun describes, or form one of a single process; leave it at
    the end.

    CPU tensors always use gloo, so that bookkeeping never waits for the accelerator.
    """
    rank, world_size, local_rank = _read_ranks()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store = None if "WORLD_SIZE" in os.environ else dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=timeout_minutes),
    )
    try:
        yield Runtime(rank=rank, world_size=world_size, local_rank=local_rank, device=device)
    finally:
        if dist.is_initialized():  # an engine may have destroyed it
            dist.destroy_process_group()
