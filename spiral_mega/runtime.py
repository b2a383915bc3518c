"""Where the run happens: the one place that chooses device, backend and attention. Everything else is told."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import is_flash_attn_2_available

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """This process among its peers."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def packed_attention(self, dtype: torch.dtype) -> str:
        """The attention for packed sequences that suits the device: flash-attn's kernels take half precision only."""
        half = dtype in (torch.bfloat16, torch.float16)
        if self.device.type == "cuda" and half:
            if is_flash_attn_2_available():
                return "flash_attention_2"
            log.warning(
                "flash-attn is not installed: packed sequences go through SDPA, group by group, which is slower"
            )
        return "segment_sdpa"

    def vllm_options(self) -> dict[str, Any]:
        """How vLLM is to run on the device, beside the policy and with a KV cache of a given size.

        On GPU it would refuse to start unless most of the memory were free. Its CPU build has no graphs, and cannot
        rewind a seeded generator after a prompt that was prefilled in parts.
        """
        if self.device.type == "cuda":
            return {"enable_chunked_prefill": True, "gpu_memory_utilization": 0.01}
        return {"enable_chunked_prefill": False, "enforce_eager": True}

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that a clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def start_runtime(*, timeout_minutes: float = 30.0) -> Iterator[Runtime]:
    """Join the process group that torchrun describes, or form one of a single process, and leave it at the end.

    CPU tensors always travel by gloo, so that bookkeeping never waits on the accelerator.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
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
        if dist.is_initialized():  # an engine may have ended it
            dist.destroy_process_group()
