"""What the ranks do for test_row_gather."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from spiral_mega.distributed.row_gather import RowGatherer
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.policy.fsdp.fsdp_weights import full_weights

BUCKETS = (1, 3000, 10**6)  # bytes: smaller than any tensor, some of them, all of them


class Uneven(nn.Module):
    """Tensors whose rows no number of ranks divides, one with fewer rows than ranks, a scalar-like and a wide one."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(101, 7), (1, 5), (3, 11), (13,), (6, 4, 3)]
        torch.manual_seed(0)
        self.config = SimpleNamespace(
            model_type="llama"
        )  # whose checkpoints name tensors as the model does
        self.tensors = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])


def run(runtime: Runtime, _: Any) -> dict[str, Any]:
    return {"whole": whole(runtime), "kept": kept(runtime)}


def whole(runtime: Runtime) -> list[tuple[str, bool]]:
    """Whether gathering gave torch's own full tensors, bit for bit, three times over with weights that move."""
    model = Uneven()
    fully_shard(model, mesh=init_device_mesh("cpu", (runtime.world_size,)))
    found = []
    gatherer = RowGatherer(dist.group.WORLD)
    for bucket in BUCKETS:
        for dtype in (torch.float32, torch.bfloat16):
            for _ in range(3):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1.0)
                expected = {name: _full(p).to(dtype) for name, p in model.named_parameters()}
                same = []
                for name, tensor in full_weights(model, gatherer, bucket_bytes=bucket, dtype=dtype):
                    same.append(torch.equal(tensor, expected.pop(name)))
                found.append((f"{bucket} {dtype}", all(same) and not expected))
    return found


def kept(runtime: Runtime) -> bool:
    """Whether tensors that a reader keeps, as an engine may, on one rank or all, stay what they were."""
    model = Uneven()
    fully_shard(model, mesh=init_device_mesh("cpu", (runtime.world_size,)))
    gatherer, held, expected = RowGatherer(dist.group.WORLD), [], []
    for turn in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        for index, (_, tensor) in enumerate(full_weights(model, gatherer, bucket_bytes=300)):
            if index % 2 == 0 and (turn != 1 or runtime.rank == 0):
                held.append(tensor[:1])
                expected.append(tensor[:1].clone())
    return all(map(torch.equal, held, expected))


def _full(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()
