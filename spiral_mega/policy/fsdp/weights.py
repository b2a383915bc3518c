"""The policy's weights out of their shards, for engines and exports: whole tensors, a bucket at a time.

Adapters are merged on the shard, before gathering: each rank computes its own rows of W + scale * B A. The tensors of a
bucket travel together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from spiral_mega.policy.lora import ADAPTER


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor to give away under `names`; `adapter` is the layer whose low-rank update is merged into it, or None."""

    names: list[str]
    parameter: torch.Tensor
    adapter: Any


def full_weights(
    model: nn.Module, *, bucket_bytes: int, dtype: torch.dtype | None = None, merge: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors by Hugging Face name, in `dtype` (default: their own), of adapters merged: W + scale * B A.

    At most `bucket_bytes` are gathered at once, or one tensor if that is larger. A tied head comes as a tensor of its
    own, if it has an adapter. Collective: every rank must iterate to the end.
    """
    for bucket in _buckets(_entries(model, merge), bucket_bytes, dtype):
        adapted = [entry for entry in bucket if entry.adapter is not None]
        factors = dict(zip(map(id, adapted), gather([_factor(entry.adapter.lora_A) for entry in adapted]), strict=True))
        fills = [partial(_merged, entry.adapter, factors[id(entry)]) if entry.adapter else _copied for entry in bucket]
        tensors = _gather([entry.parameter for entry in bucket], dtype or bucket[0].parameter.dtype, fills)
        for entry, tensor in zip(bucket, tensors, strict=True):
            for name in entry.names:
                yield name, tensor


def adapter_weights(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole factors A [r, in] and B [out, r] of every adapted layer, by the names of PEFT's files; collective."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if ".lora_" in name]
    tensors = gather([parameter for _, parameter in named])
    for (name, _), tensor in zip(named, tensors, strict=True):
        yield name.replace(f".{ADAPTER}.weight", ".weight"), tensor


def gather(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """The whole of each parameter, detached. All are of one type."""
    return list(_gather(parameters, parameters[0].dtype, [_copied] * len(parameters))) if parameters else []


def _entries(model: nn.Module, merge: bool) -> list[_Entry]:
    any_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    entries: dict[tuple[int, int], _Entry] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        if parameter.requires_grad and any_sharded and not isinstance(parameter, DTensor):
            raise RuntimeError(f"{name} is unsharded, so it holds a copy in compute type and not the weight itself")
        owner, _, leaf = name.rpartition(".")
        adapter: Any = None
        if owner == "base_layer" or owner.endswith(".base_layer"):
            owner = owner.removesuffix("base_layer").removesuffix(".")
            name = f"{owner}.{leaf}"
            adapter = base.get_submodule(owner) if merge and leaf == "weight" else None
        entries.setdefault((id(parameter), id(adapter)), _Entry([], parameter, adapter)).names.append(name)
    return list(entries.values())


def _buckets(entries: Iterable[_Entry], limit: int, dtype: torch.dtype | None) -> Iterator[list[_Entry]]:
    """Entries in order, in groups of one type and at most `limit` bytes, or of one entry."""
    bucket: list[_Entry] = []
    filled = 0
    for entry in entries:
        kind = dtype or entry.parameter.dtype
        size = entry.parameter.numel() * kind.itemsize
        if bucket and (filled + size > limit or kind != (dtype or bucket[0].parameter.dtype)):
            yield bucket
            bucket, filled = [], 0
        bucket.append(entry)
        filled += size
    if bucket:
        yield bucket


def _merged(layer: Any, factor: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Rows of W + scale * B A into `out`, of `weight`, the local rows of W, and the same rows of B with the whole A."""
    update, scale = (_local(_factor(layer.lora_B)), factor), layer.scaling[ADAPTER]
    if out.dtype == weight.dtype:
        torch.addmm(weight, *update, alpha=scale, out=out)
    else:
        out.copy_(torch.addmm(weight, *update, alpha=scale))


def _copied(weight: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(weight)


def _gather(
    parameters: list[torch.Tensor],
    dtype: torch.dtype,
    fills: Sequence[Callable[[torch.Tensor, torch.Tensor], None]],
) -> Iterator[torch.Tensor]:
    """Whole tensors of `dtype`, each with memory of its own or the parameter's. `fills` write the local rows."""
    locals_ = [_local(parameter) for parameter in parameters]
    mesh = next((parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)), None)
    if mesh is None or mesh.size() == 1:
        for local, fill in zip(locals_, fills, strict=True):
            if fill is _copied and local.dtype == dtype:
                yield local
                continue
            whole = torch.empty_like(local, dtype=dtype)
            fill(local, whole)
            yield whole
        return
    for parameter in parameters:
        if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),) or parameter.device_mesh != mesh:
            raise RuntimeError(f"a weight of shape {tuple(parameter.shape)} is not sharded by rows as the others are")
    group, rank = mesh.get_group(), mesh.get_local_rank()
    wholes, works = [], []
    for parameter, local, fill in zip(parameters, locals_, fills, strict=True):
        # As FSDP shards: every rank has as many rows, the last ones fewer or none; what they lack is padding here.
        rows = -(-parameter.shape[0] // mesh.size())
        whole = torch.empty(mesh.size() * rows, *parameter.shape[1:], dtype=dtype, device=local.device)
        fill(local, whole[rank * rows :][: len(local)])
        # Each rank's rows straight into their place: an all-gather on CPU copies everything twice more.
        works.append(
            [
                dist.broadcast(part, group=group, group_src=source, async_op=True)
                for source, part in enumerate(torch.split(whole, rows))
            ]
        )
        wholes.append(whole)
    for parameter, pending in zip(parameters, works, strict=True):
        for work in pending:
            work.wait()
        yield wholes.pop(0)[: parameter.shape[0]]


def _factor(layers: Any) -> torch.Tensor:
    weight: torch.Tensor = layers[ADAPTER].weight
    return weight


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
