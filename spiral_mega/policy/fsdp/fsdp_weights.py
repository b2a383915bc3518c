"""The policy's weights out of their shards, for engines and exports: whole tensors, a bucket at a time.

Adapters are merged on the shard, before gathering: each rank computes its own rows of W + scale * B A. The tensors of a
bucket travel together, and with them the factors A that merging takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from spiral_mega.distributed.row_gather import RowGatherer, local_shard
from spiral_mega.models.tensor_names import checkpoint_tensors
from spiral_mega.policy.lora import ADAPTER, is_of
from spiral_mega.process.heartbeat import heartbeat

MERGE_ELEMENTS = 2**18  # of B A at a time, so that the sum and its change of type find it in the cache


@dataclass(frozen=True, slots=True)
class _Update:
    """scale * B A, of an adapter: parameters A [r, in] and B [out, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor to give away under `names`, and the low-rank update that is merged into it, or None."""

    names: list[str]
    parameter: torch.Tensor
    update: _Update | None


def full_weights(
    model: nn.Module,
    gatherer: RowGatherer,
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    adapter: str | None = ADAPTER,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors by Hugging Face name, in `dtype` (default: their own), `adapter`, if any, merged: W + scale * B A.

    At most `bucket_bytes` are gathered at once, or one tensor if that is larger. A tied head comes as a tensor of its
    own, if it has an adapter. Collective: every rank must iterate to the end.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    return checkpoint_tensors(base.config.model_type, _stream(_entries(model, adapter), gatherer, bucket_bytes, dtype))


def adapter_weights(
    model: PeftModel, gatherer: RowGatherer, *, bucket_bytes: int, adapter: str = ADAPTER
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole factors A [r, in] and B [out, r] of every adapted layer, by the names of PEFT's files; as above."""
    named = [
        (name.removesuffix(f".{adapter}.weight"), p) for name, p in model.named_parameters() if is_of(adapter, name)
    ]
    return _stream([_Entry([f"{name}.weight"], p, None) for name, p in named], gatherer, bucket_bytes, None)


def _stream(
    entries: Iterable[_Entry], gatherer: RowGatherer, bucket_bytes: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for bucket in _buckets(entries, bucket_bytes, dtype):
        heartbeat()
        whole = _gather(bucket, gatherer, dtype or bucket[0].parameter.dtype)
        for entry, tensor in zip(bucket, whole, strict=True):
            for name in entry.names:
                yield name, tensor


def _entries(model: nn.Module, adapter: str | None) -> list[_Entry]:
    any_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    entries: dict[tuple[int, str], _Entry] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        if parameter.requires_grad and any_sharded and not isinstance(parameter, DTensor):
            raise RuntimeError(f"{name} is unsharded, so it holds a copy in compute type and not the weight itself")
        owner, _, leaf = name.rpartition(".")
        update, layer = None, ""  # a tied tensor is given once, but for one that an adapter changes
        if owner == "base_layer" or owner.endswith(".base_layer"):
            owner = owner.removesuffix("base_layer").removesuffix(".")
            name = f"{owner}.{leaf}"
            if adapter is not None and leaf == "weight":
                update, layer = _update(base.get_submodule(owner), adapter), owner
        entries.setdefault((id(parameter), layer), _Entry([], parameter, update)).names.append(name)
    return list(entries.values())


def _buckets(entries: Iterable[_Entry], limit: int, dtype: torch.dtype | None) -> Iterator[list[_Entry]]:
    """Entries in order, in groups of one type and at most `limit` bytes with their factors A, or of one entry."""
    bucket: list[_Entry] = []
    filled = 0
    for entry in entries:
        kind = dtype or entry.parameter.dtype
        factors = [] if entry.update is None else [entry.update.a]
        size = entry.parameter.numel() * kind.itemsize + sum(each.numel() * each.itemsize for each in factors)
        if bucket and (filled + size > limit or kind != (dtype or bucket[0].parameter.dtype)):
            yield bucket
            bucket, filled = [], 0
        bucket.append(entry)
        filled += size
    if bucket:
        yield bucket


def _gather(bucket: Sequence[_Entry], gatherer: RowGatherer, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The bucket's tensors, whole and merged, of `dtype`, each with memory of its own or its parameter's."""
    parameters = [entry.parameter for entry in bucket]
    factors = [entry.update.a for entry in bucket if entry.update is not None]
    mesh = next((each.device_mesh for each in (*parameters, *factors) if isinstance(each, DTensor)), None)
    if mesh is None or mesh.size() == 1:
        for entry in bucket:
            if entry.update is None and entry.parameter.dtype == dtype:
                yield _local(entry.parameter)
                continue
            whole = torch.empty_like(_local(entry.parameter), dtype=dtype)
            _write(entry, None if entry.update is None else _local(entry.update.a), whole)
            yield whole
        return
    for each in (*parameters, *factors):
        if not isinstance(each, DTensor) or each.placements != (Shard(0),) or each.device_mesh != mesh:
            raise RuntimeError(f"a weight of shape {tuple(each.shape)} is not sharded by rows as the others are")
    rank, size = mesh.get_local_rank(), mesh.size()
    forms = [*((each.shape, each.dtype) for each in factors), *((each.shape, dtype) for each in parameters)]
    wholes = gatherer.empty(forms, _local(parameters[0]).device)
    whole_factors, wholes = wholes[: len(factors)], wholes[len(factors) :]
    for factor, whole in zip(factors, whole_factors, strict=True):
        local_shard(whole, rank, size).copy_(_local(factor))
    if factors:
        gatherer.complete(whole_factors)
    for entry, whole in zip(bucket, wholes, strict=True):
        _write(entry, None if entry.update is None else whole_factors.pop(0), local_shard(whole, rank, size))
    gatherer.complete(wholes)
    while wholes:
        yield wholes.pop(0)


def _write(entry: _Entry, factor: torch.Tensor | None, out: torch.Tensor) -> None:
    """This rank's rows of the entry's tensor into `out`: of W, or of W + scale * B A given the whole A, `factor`."""
    weight = _local(entry.parameter)
    if factor is None or entry.update is None:
        out.copy_(weight)
        return
    scale, step = entry.update.scale, max(1, MERGE_ELEMENTS // out.shape[1])
    parts = (torch.split(each, step) for each in (weight, _local(entry.update.b), out))
    for w, b, part in zip(*parts, strict=True):
        if part.dtype == w.dtype:
            torch.addmm(w, b, factor, alpha=scale, out=part)
        else:
            part.copy_(torch.addmm(w, b, factor, alpha=scale))


def _update(layer: Any, adapter: str) -> _Update:
    return _Update(layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.scaling[adapter])


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
