"""Low-rank adapters beside megatron-core's parallel linears, cut as these are.

peft decides which layers are adapted, what their factors are called and how they start; each Hugging Face linear has an
A and a B of its own, also where megatron-core fuses several. Only what is as narrow as the rank travels between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import nn
from torch.nn import functional as F

from spiral_mega.config import LoraConfig
from spiral_mega.policy.lora import ADAPTER, add_lora
from spiral_mega.policy.megatron.families import Entry
from spiral_mega.policy.megatron.megatron_weights import HEAD, ShardMap, named_over_model

ROOT = "base_model.model."


class Factors(nn.Module):
    """A [r, in] and B [out, r] of one Hugging Face linear: this rank's part of them, in float32."""

    def __init__(self, entry: Entry, a: torch.Size, b: torch.Size, ranks: int, *, sequence_parallel: bool) -> None:
        """Empty, of the whole shapes `a` and `b`. What is cut as the linear is, and what has a gradient of each rank's
        rows alone, is marked for the gradient's norm and sum."""
        super().__init__()
        (rank, columns), (rows, _), device = a, b, torch.cuda.current_device()
        by_rows = entry.dim == 0
        columns, rows = (columns, -(-rows // ranks)) if by_rows else (columns // ranks, rows)
        self.A = nn.Parameter(torch.empty(rank, columns, dtype=torch.float32, device=device))
        self.B = nn.Parameter(torch.empty(rows, rank, dtype=torch.float32, device=device))
        cut, whole = (self.B, self.A) if by_rows else (self.A, self.B)
        set_tensor_model_parallel_attributes(cut, True, entry.dim, 1)
        whole.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class LowRank(nn.Module):
    """scale * B A x for each of the linears that a parallel one is fused of; those without factors add nothing."""

    def __init__(
        self, entry: Entry, rows: Sequence[int], factors: Mapping[str, Factors], weights: ShardMap, scale: float
    ):
        """`factors` of some of the entry's tensors, of which this rank's weight has so many `rows`."""
        super().__init__()
        self.entry, self.rows, self.scale, self.off = entry, rows, scale, False
        self.group, self.groups = weights.layout.tensor_group, weights.groups
        for name, each in factors.items():
            self.add_module(_leaf(name), each)

    @property
    def factors(self) -> list[Factors | None]:
        """In the order of the entry's tensors."""
        return [getattr(self, _leaf(name), None) for name in self.entry.theirs]

    def narrow(self, x: torch.Tensor) -> torch.Tensor:
        """scale * A x of all factors, side by side."""
        whole = torch.cat([each.A for each in self.factors if each is not None])
        return self.scale * F.linear(x, whole.to(x.dtype))

    def forward(self, x: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
        """What the linear, given the same `x`, is to have added to its result."""
        narrow = self.narrow(x)
        if self.entry.dim == 0 and sequence_parallel:
            narrow = gather_from_sequence_parallel_region(narrow, group=self.group)
        elif self.entry.dim == 0:
            narrow = copy_to_tensor_model_parallel_region(narrow, group=self.group)
        elif sequence_parallel:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow, group=self.group)
        else:
            narrow = reduce_from_tensor_model_parallel_region(narrow, group=self.group)
        inputs = iter(narrow.split([len(each.A) for each in self.factors if each is not None], dim=-1))
        wide = [
            narrow.new_zeros(*narrow.shape[:-1], rows) if each is None else F.linear(next(inputs), each.B.to(x.dtype))
            for rows, each in zip(self.rows, self.factors, strict=True)
        ]
        if self.entry.fusion != "grouped":
            return torch.cat(wide, dim=-1)
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in wide], dim=-1).flatten(-2)


class LowRankHead(LowRank):
    """The head's, which linear_logprob multiplies out."""

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:  # type: ignore[override]
        """scale * A x [R, r] of `rows` [R, H], and B; None while adapters are off."""
        (factors,) = self.factors
        assert factors is not None
        return None if self.off else (self.narrow(rows), factors.B.to(rows.dtype))


@dataclass(frozen=True, slots=True)
class Adapters:
    """Those of a model: their shards, by the names of PEFT's files, and by the weight that each belongs to."""

    shards: ShardMap
    updates: dict[str, Factors]
    scale: float

    def merge(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """W + scale * B A in float32, of the rank's part of the Hugging Face tensor `name`; no other rank is asked."""
        if name not in self.updates:
            return part
        factors = self.updates[name]
        return torch.addmm(part.float(), factors.B.detach()[: len(part)], factors.A.detach(), alpha=self.scale)


def adapts_head(lora: LoraConfig | None) -> bool:
    return lora is not None and _leaf(HEAD) in lora.targets


def add_adapters(
    stages: Sequence[Any], twin: Any, entries: Sequence[Entry], lora: LoraConfig, seed: int, weights: ShardMap
) -> Adapters:
    """Freeze a rank's stages, of the weights `weights`, and put adapters beside their linears; they alone are trained.

    `twin` is the Hugging Face model without weights, in which peft makes the start that every policy has. Collective.
    Raises UserError for layers that the model lacks.
    """
    starts = _starts(twin, lora, seed)
    layout, scale = weights.layout, lora.alpha / lora.rank
    modules = named_over_model(stages, layout, lambda stage: stage.named_modules())
    for stage in stages:
        stage.requires_grad_(False)
        if stage.pre_process and stage.config.recompute_granularity is not None:
            # Recomputation gives no gradients to a layer none of whose inputs wants one.
            stage.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
    adapter_entries: list[Entry] = []
    updates: dict[str, Factors] = {}
    for entry in entries:
        owner, adapted = entry.ours.removesuffix(".weight"), [n for n in entry.theirs if _names(n)[0] in starts]
        for name in adapted:
            (a, b), ours = _names(name), f"{owner}.lora.{_leaf(name)}"
            adapter_entries.append(Entry(f"{ours}.A", (a,), 1 if entry.dim == 1 else None))
            adapter_entries.append(Entry(f"{ours}.B", (b,), 0 if entry.dim == 0 else None))
        if not adapted or owner not in modules:
            continue
        is_head = owner == "output_layer"
        parallel = stages[0].config.sequence_parallel and not is_head  # the head gets every row
        shapes = {name: [starts[each].shape for each in _names(name)] for name in adapted}
        factors = {
            n: Factors(entry, a, b, layout.tensor_size, sequence_parallel=parallel) for n, (a, b) in shapes.items()
        }
        updates |= factors
        rows = [weights.part(entry, name).rows(weights.shapes[name]) for name in entry.theirs]
        modules[owner].lora = (LowRankHead if is_head else LowRank)(entry, rows, factors, weights, scale)
        if not is_head:
            modules[owner].register_forward_hook(_add)
    named = named_over_model(stages, layout, lambda stage: stage.named_parameters())
    parameters = {name: parameter for name, parameter in named.items() if ".lora." in name}
    shards = ShardMap(parameters, adapter_entries, lambda name: starts[name].shape, layout, groups=1)
    if left := sorted(starts.keys() - shards.shapes.keys()):
        raise ValueError(f"no table knows {', '.join(left)}")
    shards.load(
        lambda name, p: starts[name] if p.dim is None else starts[name].narrow(p.dim, p.start, p.stop - p.start)
    )
    return Adapters(shards, updates, scale)


def _add(linear: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Hook of a parallel linear: its result, and the bias that it leaves to the caller."""
    result, bias = output
    return (result if linear.lora.off else result + linear.lora(inputs[0], linear.sequence_parallel)), bias


def _starts(twin: Any, lora: LoraConfig, seed: int) -> dict[str, torch.Tensor]:
    """Whole factors by the names of PEFT's files, as peft starts them. Weights of the twin become a single zero each,
    seen from everywhere, so that peft finds them on the CPU."""
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.zeros(()).expand(module.weight.shape), requires_grad=False)
    named = add_lora(twin, lora, seed).named_parameters()
    return {name.replace(f".{ADAPTER}.weight", ".weight"): p.detach() for name, p in named if ".lora_" in name}


def _names(weight: str) -> tuple[str, str]:
    """PEFT's names of A and B of a Hugging Face weight."""
    layer = ROOT + weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def _leaf(weight: str) -> str:
    return weight.split(".")[-2]


@contextmanager
def adapters_off(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Those of `stages` contribute nothing meanwhile."""
    layers = [module for stage in stages for module in stage.modules() if isinstance(module, LowRank)]
    try:
        for layer in layers:
            layer.off = True
        yield
    finally:
        for layer in layers:
            layer.off = False
