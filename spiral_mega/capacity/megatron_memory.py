"""Analytic memory of the Megatron policy, for each stage of the pipeline. Bytes throughout."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from spiral_mega.capacity.policy_memory import FLOAT, HEAD_STRIP, RESPONSE_SHARE, PolicyMemory
from spiral_mega.config import Config, MegatronConfig
from spiral_mega.models.dimensions import ModelSizes, itemsize

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ROW_PARALLEL = ("o_proj", "down_proj")  # split by input features; the others by output features


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Counts of the weights on one rank. Experts are apart, because their replicas are on other ranks."""

    layers: int

    dense: float
    experts: float
    largest: float  # of any single parameter
    adapters: float


def stages(config: Config, sizes: ModelSizes, world: int) -> list[PolicyMemory]:
    """Forecast what policy/megatron takes of a rank in each pipeline stage."""
    return [
        _stage(config, sizes, world, stage)
        for stage in range(config.policy.megatron.pipeline_parallel)
    ]


def layers_of(layout: MegatronConfig, layers: int, stage: int) -> int:
    """Return how many layers a rank of the stage holds; where stages are unequal the first ones hold one more."""
    count = layout.pipeline_parallel * layout.virtual_stages
    chunks = range(stage, count, layout.pipeline_parallel)
    return sum((layers + count - 1 - chunk) // count for chunk in chunks)


def in_flight(layout: MegatronConfig, stage: int) -> float:
    """Return for how many micro-batches a rank of the stage keeps activations of all its layers.

    With virtual stages it keeps those of some layers for more micro-batches; the result is in units
    of all layers.
    """
    stages_after = layout.pipeline_parallel - 1 - stage
    chunks = layout.virtual_stages
    if chunks == 1:
        return 1 + stages_after
    return (2 * stages_after + (chunks - 1) * layout.pipeline_parallel + 1) / chunks


def rank_weights(config: Config, sizes: ModelSizes, stage: int) -> RankWeights:
    """Count the weights of one rank of the stage. Vectors and routers are whole on every rank."""
    layout = config.policy.megatron
    tensor = layout.tensor_parallel
    layers = layers_of(layout, sizes.layers, stage)
    sparse = sizes.moe_layers / sizes.layers * layers
    hidden = sizes.hidden
    shapes = _linear_shapes(sizes)
    attention = sum(prod(shapes[name]) for name in ATTENTION) / tensor
    dense_mlp = sum(prod(shapes[name]) for name in MLP) / tensor
    vectors = 2 * hidden + (2 * sizes.head_dim if sizes.qk_norm else 0)
    first, last = stage == 0, stage == layout.pipeline_parallel - 1
    table = sizes.vocabulary * hidden / tensor
    tables = table * (int(first) + int(last and not (sizes.tied and first)))
    dense = layers * (attention + vectors) + (layers - sparse) * dense_mlp + tables
    dense += sparse * sizes.experts * hidden + (hidden if last else 0)
    return RankWeights(
        layers=layers,
        dense=dense,
        experts=sparse * sizes.experts / layout.expert_parallel * sizes.expert_params,
        largest=max(table if first or last else 0.0, 2 * hidden * sizes.intermediate / tensor),
        adapters=_adapter_weights(config, shapes, layers, sparse, last=last),
    )


def _linear_shapes(sizes: ModelSizes) -> dict[str, tuple[int, int]]:
    """Return (input features, output features) of each linear map."""
    hidden, q, kv = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, sizes.intermediate),
        "up_proj": (hidden, sizes.intermediate),
        "down_proj": (sizes.intermediate, hidden),
        "lm_head": (hidden, sizes.vocabulary),
    }


def _adapter_weights(
    config: Config, shapes: dict[str, tuple[int, int]], layers: int, sparse: float, *, last: bool
) -> float:
    lora, tensor = config.model.lora, config.policy.megatron.tensor_parallel
    if lora is None:
        return 0.0
    copies = (
        dict.fromkeys(ATTENTION, float(layers))
        | dict.fromkeys(MLP, layers - sparse)
        | {"lm_head": float(last)}
    )
    count = 0.0
    for name, (inputs, outputs) in shapes.items():
        if name not in lora.targets:
            continue
        sharded, whole = (inputs, outputs) if name in ROW_PARALLEL else (outputs, inputs)
        count += copies[name] * lora.rank * (sharded / tensor + whole)
    return count


def layer_bytes(config: Config, sizes: ModelSizes, *, sparse: bool) -> float:
    """Forecast what a layer keeps of one token of a micro-batch for its backward pass, without
    recomputation.

    A norm keeps its input in float32, its result and, to train its weight, the tensor that it
    multiplies; the gated MLP keeps four tensors of its inner width, for each expert that the token
    is routed to.
    """
    layout, item = config.policy.megatron, itemsize(config.policy.param_dtype)
    tensor = layout.tensor_parallel
    sequence = tensor if layout.sequence_parallel else 1
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    normed = FLOAT if config.model.lora is not None else FLOAT + item
    norms = 2 * sizes.hidden * (normed + item) / sequence
    head_norms = (q + kv) * normed / tensor if sizes.qk_norm else 0
    # Rotated queries and keys, the values as a view of the product that holds all three, and the
    # result. Context parallelism gathers the keys and values of all rows.
    gathered = 2 * kv * layout.context_parallel if layout.context_parallel > 1 else 0
    attention = (item * (3 * q + 3 * kv + gathered) + FLOAT * sizes.heads) / tensor
    if not sparse:
        return norms + head_norms + attention + 4 * item * sizes.intermediate / tensor
    # With equally busy experts a rank receives as many tokens as it sends.
    routed = (
        sizes.experts_per_token
        * item
        * (2 * sizes.hidden + 4 * sizes.expert_intermediate)
        / sequence
    )
    return norms + head_norms + attention + routed + 2 * FLOAT * sizes.experts / sequence


def _stage(config: Config, sizes: ModelSizes, world: int, stage: int) -> PolicyMemory:
    layout, item = config.policy.megatron, itemsize(config.policy.param_dtype)
    weights = rank_weights(config, sizes, stage)
    dense_copies = world / (layout.tensor_parallel * layout.pipeline_parallel)
    expert_copies = world / (layout.pipeline_parallel * layout.expert_parallel)
    lora, kl = config.model.lora is not None, config.algorithm.kl
    base = item * (weights.dense + weights.experts)
    resident = {"weights": base + FLOAT * weights.adapters}
    if kl is not None and (kl.reference is not None or not lora):
        resident["reference"] = base
    if lora:
        trained, shard = weights.adapters, weights.adapters / dense_copies
    else:
        trained = weights.dense + weights.experts
        shard = weights.dense / dense_copies + weights.experts / expert_copies
    # The optimizer holds float32 masters of two-byte weights; adapters are float32 themselves.
    moment_bytes = 2 * FLOAT if lora or item == FLOAT else 3 * FLOAT
    return PolicyMemory(
        resident={**resident, "gradients (float32)": FLOAT * trained},
        moments={"optimizer": moment_bytes * shard},
        update=_update(config, sizes, weights, stage),
        step={"optimizer's scratch": FLOAT * shard},
    )


def _update(
    config: Config, sizes: ModelSizes, weights: RankWeights, stage: int
) -> dict[str, float]:
    """Forecast the activations of the micro-batches in flight, and the scratch of one layer's or
    the head's backward pass."""
    layout, item = config.policy.megatron, itemsize(config.policy.param_dtype)
    checkpointing = config.policy.activation_checkpointing
    tokens = config.policy.microbatch_tokens / layout.context_parallel
    dense_layer = layer_bytes(config, sizes, sparse=False)
    sparse_layer = layer_bytes(config, sizes, sparse=True)
    sparse_layers = sizes.moe_layers / sizes.layers * weights.layers
    largest_layer = max(
        dense_layer if sparse_layers < weights.layers else 0, sparse_layer if sparse_layers else 0
    )
    if checkpointing:
        sequence = layout.tensor_parallel if layout.sequence_parallel else 1
        kept = weights.layers * item * sizes.hidden / sequence
    else:
        kept = (weights.layers - sparse_layers) * dense_layer + sparse_layers * sparse_layer
    scratch = _layer_scratch(
        config, sizes, tokens, largest_layer if checkpointing else 0, moe=sparse_layers > 0
    )
    if stage == layout.pipeline_parallel - 1:
        scratch = max(scratch, _head_scratch(config, sizes, tokens))
    return {
        "activations": tokens * kept * in_flight(layout, stage),
        "backward scratch": scratch,
        "gradients not yet added": 0.0 if config.model.lora is not None else item * weights.largest,
    }


def _layer_scratch(
    config: Config, sizes: ModelSizes, tokens: float, recomputed: float, *, moe: bool
) -> float:
    """Forecast the scratch of a layer's backward pass; `recomputed` are its activations per token, if recomputed."""
    layout, item = config.policy.megatron, itemsize(config.policy.param_dtype)
    sequence = layout.tensor_parallel if layout.sequence_parallel else 1
    if moe:
        inner = sizes.experts_per_token * sizes.expert_intermediate / sequence
    else:
        inner = sizes.intermediate / layout.tensor_parallel
    gathered = (
        2 * item * sizes.hidden if sequence > 1 else 0
    )  # the whole input of a linear map, and its gradient
    return tokens * (recomputed + item * (3 * inner + 2 * sizes.hidden / sequence) + gathered)


def _head_scratch(config: Config, sizes: ModelSizes, tokens: float) -> float:
    item = itemsize(config.policy.param_dtype)
    gathered = tokens * item * sizes.hidden if config.policy.megatron.tensor_parallel > 1 else 0
    return RESPONSE_SHARE * tokens * sizes.hidden * (item + FLOAT) + 2 * HEAD_STRIP + gathered
