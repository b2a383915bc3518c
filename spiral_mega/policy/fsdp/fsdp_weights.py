"""Stream the policy's weights out of their FSDP2 shards, for engines and exports: whole tensors, a
bucket at a time.

    A, sharded by rows        W and B, sharded by rows
        | gather                   |
        v                          |
    A, whole on each rank          |
        +-------------+------------+
                      v
    each rank writes its own rows of W + scale * B A into an empty tensor
                      | gather
                      v
    (name, whole tensor), ... on each rank

Adapters are merged on the shards, before gathering. The tensors of a bucket are gathered together,
and so are the factors A that merging needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from spiral_mega.distributed.row_gather import RowGatherer, TensorSpec, local_shard
from spiral_mega.models.tensor_names import to_checkpoint_names
from spiral_mega.policy.lora import DEFAULT_ADAPTER, is_adapter_parameter
from spiral_mega.policy.weight_buckets import make_buckets
from spiral_mega.process.heartbeat import heartbeat

MERGE_ELEMENTS = (
    2**18
)  # elements of B A computed at a time, so that the addition and the cast find them in the cache


@dataclass(frozen=True, slots=True)
class _LowRankUpdate:
    """scale * B A, an adapter's change to a weight: parameters A [r, in] and B [out, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor to yield under each of `names`, and the update to merge into it, or None."""

    names: list[str]
    parameter: torch.Tensor
    update: _LowRankUpdate | None


def full_weights(
    model: nn.Module,
    gatherer: RowGatherer,
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    adapter: str | None = DEFAULT_ADAPTER,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors by Hugging Face name, in `dtype` (default: their own); collective.

    `adapter`, if any, is merged: W + scale * B A. A tied head is a tensor of its own if it has an
    adapter. At most `bucket_bytes` are gathered at once, or one tensor if that is larger. Every
    rank must iterate to the end.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    tensors = _stream(_list_entries(model, adapter), gatherer, bucket_bytes, dtype)
    return to_checkpoint_names(base.config.model_type, tensors)


def adapter_weights(
    model: PeftModel, gatherer: RowGatherer, *, bucket_bytes: int, adapter: str = DEFAULT_ADAPTER
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole factors A [r, in] and B [out, r] of each adapted layer by the names of PEFT's
    files; collective.

    Buckets are those of `full_weights`.
    """
    entries = []
    for name, parameter in model.named_parameters():
        if is_adapter_parameter(name, adapter):
            layer = name.removesuffix(f".{adapter}.weight")
            entries.append(_Entry([f"{layer}.weight"], parameter, None))
    return _stream(entries, gatherer, bucket_bytes, None)


def _list_entries(model: nn.Module, adapter: str | None) -> list[_Entry]:
    """List the tensors to yield; tied parameters are one entry, unless an adapter changes one of them."""
    any_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    entries: dict[tuple[int, str], _Entry] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        if parameter.requires_grad and any_sharded and not isinstance(parameter, DTensor):
            raise RuntimeError(
                f"{name} is unsharded, so it holds a copy in compute dtype and not the weight itself"
            )
        owner, _, leaf = name.rpartition(".")
        layer = _adapted_layer(owner)
        update = None
        if layer is not None:
            name = f"{layer}.{leaf}"
            if adapter is not None and leaf == "weight":
                update = _low_rank_update(base.get_submodule(layer), adapter)
        key = id(parameter), "" if update is None else owner
        entries.setdefault(key, _Entry([], parameter, update)).names.append(name)
    return list(entries.values())


def _adapted_layer(owner: str) -> str | None:
    """Return the layer that peft wrapped, if the module `owner` is its `base_layer`."""
    layer, _, leaf = owner.rpartition(".")
    return layer if leaf == "base_layer" else None


def _low_rank_update(layer: Any, adapter: str) -> _LowRankUpdate:
    return _LowRankUpdate(
        layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.scaling[adapter]
    )


def _stream(
    entries: Iterable[_Entry], gatherer: RowGatherer, bucket_bytes: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `entries` in order, in buckets of one dtype each."""

    def num_bytes(entry: _Entry) -> int:
        size = entry.parameter.numel() * (dtype or entry.parameter.dtype).itemsize
        return (
            size
            if entry.update is None
            else size + entry.update.a.numel() * entry.update.a.itemsize
        )

    for bucket_dtype, same_dtype in groupby(
        entries, key=lambda entry: dtype or entry.parameter.dtype
    ):
        for bucket in make_buckets(same_dtype, num_bytes, bucket_bytes):
            heartbeat()
            for entry, whole in zip(bucket, _gather(bucket, gatherer, bucket_dtype), strict=True):
                for name in entry.names:
                    yield name, whole


def _gather(
    bucket: Sequence[_Entry], gatherer: RowGatherer, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Yield the bucket's tensors, whole and merged, in `dtype`, each in memory of its own or its parameter's."""
    parameters = [entry.parameter for entry in bucket]
    factors = [entry.update.a for entry in bucket if entry.update is not None]
    mesh = next(
        (each.device_mesh for each in (*parameters, *factors) if isinstance(each, DTensor)), None
    )
    if mesh is None or mesh.size() == 1:
        for entry in bucket:
            yield _merge_unsharded(entry, dtype)
        return
    _check_row_sharded((*parameters, *factors), mesh)
    wholes = _write_shards(bucket, mesh, gatherer, dtype)
    gatherer.complete(wholes)
    while wholes:  # drop each tensor once it is read
        yield wholes.pop(0)


def _merge_unsharded(entry: _Entry, dtype: torch.dtype) -> torch.Tensor:
    """Merge where one rank holds all rows; the parameter's own memory if nothing changes."""
    weight = _local(entry.parameter)
    if entry.update is None and weight.dtype == dtype:
        return weight
    merged = torch.empty_like(weight, dtype=dtype)
    _write_rows(entry, None if entry.update is None else _local(entry.update.a), merged)
    return merged


def _check_row_sharded(tensors: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    for tensor in tensors:
        if (
            not isinstance(tensor, DTensor)
            or tensor.placements != (Shard(0),)
            or tensor.device_mesh != mesh
        ):
            raise RuntimeError(
                f"a weight of shape {tuple(tensor.shape)} is not sharded by rows as the others are"
            )


def _write_shards(
    bucket: Sequence[_Entry], mesh: DeviceMesh, gatherer: RowGatherer, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Allocate the bucket's whole tensors and write this rank's rows of each."""
    factors = _gather_factors(bucket, mesh, gatherer)
    device = _local(bucket[0].parameter).device
    wholes = gatherer.empty([TensorSpec(entry.parameter.shape, dtype) for entry in bucket], device)
    for entry, factor, whole in zip(bucket, factors, wholes, strict=True):
        _write_rows(entry, factor, local_shard(whole, mesh.get_local_rank(), mesh.size()))
    return wholes


def _gather_factors(
    bucket: Sequence[_Entry], mesh: DeviceMesh, gatherer: RowGatherer
) -> list[torch.Tensor | None]:
    """Gather the whole factor A of each entry's update; None for entries without one."""
    factors = [entry.update.a for entry in bucket if entry.update is not None]
    if not factors:
        return [None] * len(bucket)
    specs = [TensorSpec(factor.shape, factor.dtype) for factor in factors]
    wholes = gatherer.empty(specs, _local(factors[0]).device)
    for factor, whole in zip(factors, wholes, strict=True):
        local_shard(whole, mesh.get_local_rank(), mesh.size()).copy_(_local(factor))
    gatherer.complete(wholes)
    in_order = iter(wholes)
    return [None if entry.update is None else next(in_order) for entry in bucket]


def _write_rows(entry: _Entry, factor: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write this rank's rows of the tensor into `out`: of W, or of W + scale * B A given the whole A, `factor`."""
    weight = _local(entry.parameter)
    if factor is None or entry.update is None:
        out.copy_(weight)
        return
    num_rows = max(1, MERGE_ELEMENTS // out.shape[1])
    parts = (torch.split(tensor, num_rows) for tensor in (weight, _local(entry.update.b), out))
    for w, b, part in zip(*parts, strict=True):
        if part.dtype == w.dtype:
            torch.addmm(w, b, factor, alpha=entry.update.scale, out=part)
        else:
            part.copy_(torch.addmm(w, b, factor, alpha=entry.update.scale))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
