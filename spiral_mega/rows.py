"""Whole tensors from rows that the ranks hold: by broadcasts, or by memory that the ranks of one host share.

    wholes = rows.empty(forms, device)    # collective
    ...                                   # each rank writes its own rows of them
    rows.complete(wholes)                 # collective; now all rows are there

Tensor i's rows are split as FSDP2 does: as many on each rank, fewer or none on the last ones.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist

Form = tuple[torch.Size, torch.dtype]
ALIGNMENT = 64  # bytes


class Rows(Protocol):
    """How the ranks of a group complete tensors together."""

    def empty(self, forms: Sequence[Form], device: torch.device) -> list[torch.Tensor]:
        """Tensors of these shapes and types; their memory is the caller's for as long as a view of it lives."""

    def complete(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each rank has written its rows of `tensors`; bring the others' rows."""


def own_rows(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The rows of `tensor` that `rank` holds, a view, possibly empty."""
    size = -(-len(tensor) // world_size)
    return tensor[rank * size : (rank + 1) * size]


class BroadcastRows:
    """Each rank's rows go straight into their place: an all-gather on CPU copies everything twice more."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def empty(self, forms: Sequence[Form], device: torch.device) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms]

    def complete(self, tensors: Sequence[torch.Tensor]) -> None:
        works = []
        for tensor in tensors:
            for source in range(self.group.size()):
                if (part := own_rows(tensor, source, self.group.size())).numel():
                    works.append(dist.broadcast(part, group=self.group, group_src=source, async_op=True))
        for work in works:
            work.wait()


class SharedRows:
    """Every rank writes its rows into the same memory, so nothing is sent. For CPU tensors of one host's processes.

    Two segments take turns, so that what was handed out last may still be read. They stay for the next time: fresh
    pages cost several times what copying into them does. A segment that some rank still reads when its turn comes is
    left to it, and another takes its place. Raises OSError on every rank if some rank cannot map the others' memory.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._segments = [_Segment(group, mmap.PAGESIZE) for _ in range(2)]

    def empty(self, forms: Sequence[Form], device: torch.device) -> list[torch.Tensor]:
        assert device.type == "cpu"
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in forms]
        room = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        self._segments.reverse()
        segment = self._segments[0]
        unusable = torch.tensor([segment.lent() or segment.size < sum(room)], dtype=torch.uint8)
        dist.all_reduce(unusable, dist.ReduceOp.MAX, self.group)
        if unusable:
            segment = self._segments[0] = _Segment(self.group, max(sum(room), segment.size))
        pieces = torch.split(segment.lend(), [*room, segment.size - sum(room)])
        return [
            piece[:size].view(dtype).view(shape)
            for piece, size, (shape, dtype) in zip(pieces, sizes, forms, strict=False)
        ]

    def complete(self, tensors: Sequence[torch.Tensor]) -> None:
        dist.barrier(self.group)


class _Segment:
    """Memory that the ranks of `group` share; without a name, so it goes with the last of them, however they end."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.size = size
        self._map = _map_shared(group, size)
        self._loan: weakref.ref[memoryview] | None = None

    def lend(self) -> torch.Tensor:
        """All of it, uint8 [size]."""
        loan = memoryview(self._map)  # which the tensor's storage keeps, and with it the mapping
        self._loan = weakref.ref(loan)
        return torch.frombuffer(loan, dtype=torch.uint8)

    def lent(self) -> bool:
        """Whether this rank has a view of what was lent last."""
        return self._loan is not None and self._loan() is not None


def _map_shared(group: dist.ProcessGroup, size: int) -> mmap.mmap:
    """`size` bytes of the first rank's that all ranks map; OSError on every rank if some rank cannot."""
    mapped, problem, fd = None, "", -1
    offer = [("", "", "")]
    if group.rank() == 0:
        name = f"spiral_mega-{secrets.token_hex(8)}"
        try:
            fd = os.memfd_create(name)
            os.ftruncate(fd, size)
            offer = [(f"/proc/{os.getpid()}/fd/{fd}", f"/memfd:{name} (deleted)", "")]
        except (OSError, AttributeError) as error:  # no such call on this system, or no memory
            offer = [("", "", f"{error}")]
    dist.broadcast_object_list(offer, group=group, group_src=0)
    path, target, problem = offer[0]
    if not problem:
        try:
            if os.readlink(path) != target:
                raise OSError(f"{path} is not the first rank's memory")
            if group.rank() != 0:
                fd = os.open(path, os.O_RDWR)
            mapped = mmap.mmap(fd, size)
        except (OSError, ValueError) as error:
            problem = f"{error}"
    problems: list[str] = [""] * group.size()
    dist.all_gather_object(problems, problem, group=group)  # and all have opened it by now
    with suppress(OSError):
        os.close(fd)
    if problem := next(filter(None, problems), ""):
        raise OSError(f"the ranks cannot share {size} bytes of memory ({problem})")
    assert mapped is not None
    return mapped
