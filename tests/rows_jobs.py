"""What the ranks do for test_rows."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from spiral_mega.policy.fsdp.weights import full_weights
from spiral_mega.rows import BroadcastRows, SharedRows
from spiral_mega.runtime import Runtime

BUCKETS = (1, 3000, 10**6)  # bytes: smaller than any tensor, some of them, all of them
CPU = torch.device("cpu")


class Uneven(nn.Module):
    """Tensors whose rows no number of ranks divides, one with fewer rows than ranks, a scalar-like and a wide one."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(101, 7), (1, 5), (3, 11), (13,), (6, 4, 3)]
        torch.manual_seed(0)
        self.config = SimpleNamespace(model_type="llama")  # whose checkpoints name tensors as the model does
        self.tensors = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])


def run(runtime: Runtime, _: Any) -> dict[str, Any]:
    jobs: dict[str, Callable[[Runtime], Any]] = {
        "whole": whole, "kept": kept, "memory": memory, "refused": refused, "choice": choice,
    }  # fmt: skip
    return {name: job(runtime) for name, job in jobs.items()}


def whole(runtime: Runtime) -> list[tuple[str, bool]]:
    """Which ways of gathering gave torch's own full tensors, bit for bit, three times over with weights that move."""
    model = Uneven()
    fully_shard(model, mesh=init_device_mesh("cpu", (runtime.world_size,)))
    found = []
    for make in (SharedRows, BroadcastRows):
        rows = make(dist.group.WORLD)
        for bucket in BUCKETS:
            for dtype in (torch.float32, torch.bfloat16):
                for _ in range(3):
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.add_(1.0)
                    expected = {name: _full(p).to(dtype) for name, p in model.named_parameters()}
                    same = []
                    for name, tensor in full_weights(model, rows, bucket_bytes=bucket, dtype=dtype):
                        same.append(torch.equal(tensor, expected.pop(name)))
                    found.append((f"{make.__name__} {bucket} {dtype}", all(same) and not expected))
    return found


def kept(runtime: Runtime) -> bool:
    """Whether tensors that a reader keeps, as an engine may, on one rank or all, stay what they were."""
    model = Uneven()
    fully_shard(model, mesh=init_device_mesh("cpu", (runtime.world_size,)))
    rows, held, expected = SharedRows(dist.group.WORLD), [], []
    for turn in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        for index, (_, tensor) in enumerate(full_weights(model, rows, bucket_bytes=300)):
            if index % 2 == 0 and (turn != 1 or runtime.rank == 0):
                held.append(tensor[:1])
                expected.append(tensor[:1].clone())
    return all(map(torch.equal, held, expected))


def memory(runtime: Runtime) -> dict[str, int]:
    """Mappings and open files of this process after many rounds, against after the first few; and at the end."""
    rows, counts = SharedRows(dist.group.WORLD), []
    for round_ in range(12):
        for rows_ in (5, 50):
            (tensor,) = rows.empty([(torch.Size([rows_, 3]), torch.float32)], CPU)
            tensor.fill_(round_)
            rows.complete([tensor])
        del tensor
        counts.append((_mappings(), len(os.listdir("/proc/self/fd"))))
    del rows
    gc.collect()
    return {"mapped": counts[-1][0] - counts[2][0], "files": counts[-1][1] - counts[2][1], "left": _mappings()}


def refused(runtime: Runtime) -> str:
    """What every rank is told when one of them may not open the memory of the first."""
    denied = mock.patch("os.open", side_effect=PermissionError("denied")) if runtime.rank == 1 else mock.MagicMock()
    try:
        with denied:
            SharedRows(dist.group.WORLD)
    except OSError as error:
        return str(error)
    return "no error"


def choice(runtime: Runtime) -> list[str]:
    """What the runtime takes where memory can be shared and where it cannot."""
    with mock.patch("os.readlink", return_value="/another/process") if runtime.rank == 1 else mock.MagicMock():
        without = type(runtime.rows()).__name__
    return [type(runtime.rows()).__name__, without]


def _full(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:spiral_mega")
