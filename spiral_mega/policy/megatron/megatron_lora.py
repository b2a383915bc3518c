"""Low-rank adapters on megatron-core's parallel linears, sharded as the linears are.

    column-parallel (q, k, v, gate, up, head)            row-parallel (o, down)

    x --W shard--------------------+--> y shard           x shard --W shard-------------------+--> y
    x --A (whole)--> A x --B shard-^                      x shard --A shard--> sum --B (whole)-^
                      gather or copy                                 (reduce or reduce-scatter)

peft decides which layers are adapted, how their factors are called and how they start. Each Hugging
Face linear has its own A and B, also where megatron-core fuses several. Only activations as narrow
as the rank travel between ranks.
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
from spiral_mega.models.peft_files import factor_names
from spiral_mega.models.tensor_names import HEAD
from spiral_mega.policy.lora import DEFAULT_ADAPTER, add_lora
from spiral_mega.policy.megatron.families import ParamMapping
from spiral_mega.policy.megatron.megatron_weights import ShardMap, by_global_name
from spiral_mega.policy.megatron.parallel_layout import ParallelLayout


class ShardedFactors(nn.Module):
    """This rank's shard of the factors A [r, in] and B [out, r] of one Hugging Face linear, in float32."""

    def __init__(
        self,
        mapping: ParamMapping,
        a: torch.Size,
        b: torch.Size,
        ranks: int,
        *,
        sequence_parallel: bool,
    ) -> None:
        """Allocate shards of factors of the whole shapes `a` and `b`, on `ranks` tensor-parallel
        ranks.

        The factor that is sharded, and the one whose gradient comes from each rank's own rows only,
        are marked, so that megatron-core computes the gradient's norm and sum correctly.
        """
        super().__init__()
        (rank, columns), (rows, _) = a, b
        column_parallel = mapping.shard_dim == 0
        if column_parallel:
            rows = -(-rows // ranks)
        else:
            columns //= ranks
        device = torch.cuda.current_device()
        self.A = nn.Parameter(torch.empty(rank, columns, dtype=torch.float32, device=device))
        self.B = nn.Parameter(torch.empty(rows, rank, dtype=torch.float32, device=device))
        sharded, whole = (self.B, self.A) if column_parallel else (self.A, self.B)
        set_tensor_model_parallel_attributes(sharded, True, mapping.shard_dim, 1)
        whole.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class ParallelLora(nn.Module):
    """Adds scale * B A x for each linear that a parallel one is fused of.

    Those without factors add nothing.
    """

    def __init__(
        self,
        mapping: ParamMapping,
        rows: Sequence[int],
        factors: Mapping[str, ShardedFactors],
        weights: ShardMap,
        scale: float,
    ) -> None:
        """`factors`: by weight, of some of the mapping's.

        `rows`: of each weight's shard on this rank.
        """
        super().__init__()
        self.mapping, self.rows, self.scale, self.disabled = mapping, rows, scale, False
        self.group, self.groups = weights.layout.tensor_group, weights.groups
        for name, each in factors.items():
            self.add_module(_module_name(name), each)

    @property
    def factors(self) -> list[ShardedFactors | None]:
        """In the order of the mapping's tensors."""
        return [getattr(self, _module_name(name), None) for name in self.mapping.hf_names]

    def narrow(self, x: torch.Tensor) -> torch.Tensor:
        """Return scale * A x of all factors, concatenated."""
        a = torch.cat([each.A for each in self.factors if each is not None])
        return self.scale * F.linear(x, a.to(x.dtype))

    def forward(self, x: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
        """Return what is added to the result that the linear computes from the same `x`."""
        narrow = self._communicate(self.narrow(x), sequence_parallel)
        ranks = [len(each.A) for each in self.factors if each is not None]
        parts = iter(torch.split(narrow, ranks, dim=-1))
        outputs = []
        for rows, factors in zip(self.rows, self.factors, strict=True):
            if factors is None:
                outputs.append(narrow.new_zeros(*narrow.shape[:-1], rows))
            else:
                outputs.append(F.linear(next(parts), factors.B.to(x.dtype)))
        if self.mapping.fusion != "grouped":
            return torch.cat(outputs, dim=-1)
        by_group = [output.view(*output.shape[:-1], self.groups, -1) for output in outputs]
        return torch.cat(by_group, dim=-1).flatten(-2)

    def _communicate(self, narrow: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
        """Turn A x of this rank's rows or columns into what its shard of B multiplies."""
        if self.mapping.shard_dim == 0:
            if sequence_parallel:
                return gather_from_sequence_parallel_region(narrow, group=self.group)
            return copy_to_tensor_model_parallel_region(narrow, group=self.group)
        if sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(narrow, group=self.group)
        return reduce_from_tensor_model_parallel_region(narrow, group=self.group)


class ParallelLoraHead(ParallelLora):
    """The head's adapter, which kernels.linear_logprob multiplies out."""

    def forward(  # type: ignore[override]
        self, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return scale * A x [R, r] of `rows` [R, H], and B; None while adapters are disabled."""
        (factors,) = self.factors
        assert factors is not None
        return None if self.disabled else (self.narrow(rows), factors.B.to(rows.dtype))


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model: their shards, by PEFT's names, and their factors by the weight that each changes."""

    shards: ShardMap
    updates: dict[str, ShardedFactors]
    scale: float

    def merge(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Return W + scale * B A in float32, of this rank's shard of the weight `name`.

        Without communication.
        """
        if name not in self.updates:
            return shard
        factors = self.updates[name]
        return torch.addmm(
            shard.float(), factors.B.detach()[: len(shard)], factors.A.detach(), alpha=self.scale
        )


def adapts_head(lora: LoraConfig | None) -> bool:
    return lora is not None and _module_name(HEAD) in lora.targets


def add_adapters(
    stages: Sequence[Any],
    twin: Any,
    mappings: Sequence[ParamMapping],
    lora: LoraConfig,
    seed: int,
    weights: ShardMap,
) -> Adapters:
    """Freeze a rank's `stages`, whose weights are `weights`, and add adapters to their linears.

    Collective. `twin` is the Hugging Face model without weights, in which peft makes the initial
    factors, the same for every policy. Raises UserError for target layers that the model lacks.
    """
    initial = _initial_factors(twin, lora, seed)
    scale = lora.alpha / lora.rank
    for stage in stages:
        _freeze(stage)
    modules = by_global_name(stages, weights.layout, lambda stage: stage.named_modules())
    factor_mappings: list[ParamMapping] = []
    updates: dict[str, ShardedFactors] = {}
    for mapping in mappings:
        adapted = [name for name in mapping.hf_names if factor_names(name)[0] in initial]
        for name in adapted:
            factor_mappings += _factor_mappings(mapping, name)
        linear = modules.get(_owner(mapping))
        if adapted and linear is not None:
            updates |= _attach(linear, mapping, adapted, initial, weights, scale)
    shards = _load_factors(stages, factor_mappings, initial, weights.layout)
    return Adapters(shards, updates, scale)


def _freeze(stage: Any) -> None:
    stage.requires_grad_(False)
    if stage.pre_process and stage.config.recompute_granularity is not None:
        # Recomputation gives no gradients to a layer none of whose inputs requires one.
        stage.embedding.register_forward_hook(
            lambda _module, _inputs, output: output.requires_grad_()
        )


def _factor_mappings(mapping: ParamMapping, name: str) -> list[ParamMapping]:
    """Map the factors of the weight `name`, one of the mapping's, to PEFT's names."""
    name_a, name_b = factor_names(name)
    path = f"{_owner(mapping)}.lora.{_module_name(name)}"
    return [
        ParamMapping(f"{path}.A", (name_a,), 1 if mapping.shard_dim == 1 else None),
        ParamMapping(f"{path}.B", (name_b,), 0 if mapping.shard_dim == 0 else None),
    ]


def _attach(
    linear: Any,
    mapping: ParamMapping,
    adapted: Sequence[str],
    initial: Mapping[str, torch.Tensor],
    weights: ShardMap,
    scale: float,
) -> dict[str, ShardedFactors]:
    """Give a parallel linear empty factors for the `adapted` ones of its weights.

    Return them by weight.
    """
    is_head = _owner(mapping) == "output_layer"
    sequence_parallel = linear.config.sequence_parallel and not is_head  # the head gets every row
    factors = {}
    for name in adapted:
        a, b = (initial[factor].shape for factor in factor_names(name))
        factors[name] = ShardedFactors(
            mapping, a, b, weights.layout.tensor_size, sequence_parallel=sequence_parallel
        )
    rows = [
        weights.shard(mapping, name).num_rows(weights.shapes[name]) for name in mapping.hf_names
    ]
    if is_head:
        linear.lora = ParallelLoraHead(mapping, rows, factors, weights, scale)
    else:
        linear.lora = ParallelLora(mapping, rows, factors, weights, scale)
        linear.register_forward_hook(_add_update)
    return factors


def _load_factors(
    stages: Sequence[Any],
    mappings: Sequence[ParamMapping],
    initial: Mapping[str, torch.Tensor],
    layout: ParallelLayout,
) -> ShardMap:
    """Fill the factors of the stages from the `initial` whole ones. Collective."""
    named = by_global_name(stages, layout, lambda stage: stage.named_parameters())
    parameters = {name: parameter for name, parameter in named.items() if ".lora." in name}
    shards = ShardMap(parameters, mappings, lambda name: initial[name].shape, layout, groups=1)
    if unmapped := sorted(initial.keys() - shards.shapes.keys()):
        raise ValueError(f"no mapping for {', '.join(unmapped)}")
    shards.load(lambda name, shard: shard.of(initial[name]))
    return shards


def _add_update(
    linear: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any]:
    """Forward hook of a parallel linear, which returns its result and the bias that it leaves to the caller."""
    result, bias = output
    if linear.lora.disabled:
        return result, bias
    return result + linear.lora(inputs[0], linear.sequence_parallel), bias


def _initial_factors(twin: Any, lora: LoraConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return whole factors by PEFT's names, as peft initializes them.

    Each weight of the twin becomes one zero that is expanded to its shape, so that peft finds it on
    the CPU.
    """
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(
                torch.zeros(()).expand(module.weight.shape), requires_grad=False
            )
    factors = {}
    for name, parameter in add_lora(twin, lora, seed).named_parameters():
        if ".lora_" in name:
            factors[name.replace(f".{DEFAULT_ADAPTER}.weight", ".weight")] = parameter.detach()
    return factors


def _owner(mapping: ParamMapping) -> str:
    """The module of megatron-core that has the mapping's parameter."""
    return mapping.megatron_name.removesuffix(".weight")


def _module_name(weight: str) -> str:
    """The last part of the name of the module that has a weight, such as q_proj."""
    return weight.split(".")[-2]


@contextmanager
def adapters_off(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Disable the adapters of `stages` within this block."""
    layers = [
        module for stage in stages for module in stage.modules() if isinstance(module, ParallelLora)
    ]
    try:
        for layer in layers:
            layer.disabled = True
        yield
    finally:
        for layer in layers:
            layer.disabled = False
