"""Memory of the Megatron policy, stage by stage of its pipeline. Bytes throughout."""

from __future__ import annotations

from dataclasses import dataclass

from spiral_mega.capacity.training_shape import FLOAT, HEAD_STRIP, SHARE_LEARNT, Training
from spiral_mega.config import Config, MegatronConfig
from spiral_mega.models.dimensions import Sizes, itemsize


@dataclass(frozen=True, slots=True)
class Held:
    """Counts of a rank's weights: those of experts apart, because other ranks have copies of them."""

    layers: int

    dense: float
    experts: float
    largest: float  # one parameter
    adapters: float


def stages(config: Config, sizes: Sizes, world: int) -> list[Training]:
    """What policy/megatron takes of the ranks of each place in the pipeline."""
    return [_stage(config, sizes, world, stage) for stage in range(config.policy.megatron.pipeline_parallel)]


def layers_of(layout: MegatronConfig, layers: int, stage: int) -> int:
    """How many of the model's layers a rank has: the first stages one more, where they cannot be equal."""
    count = layout.pipeline_parallel * layout.virtual_stages
    return sum((layers + count - 1 - each) // count for each in range(stage, count, layout.pipeline_parallel))


def in_flight(layout: MegatronConfig, stage: int) -> float:
    """For how many micro-batches a rank keeps activations of all its layers: with virtual stages of some of them."""
    behind = layout.pipeline_parallel - 1 - stage
    turns = layout.virtual_stages
    return 1 + behind if turns == 1 else (2 * behind + (turns - 1) * layout.pipeline_parallel + 1) / turns


def weights_of(config: Config, sizes: Sizes, stage: int) -> Held:
    """A rank's part of the weights; vectors and routers are whole on every rank."""
    layout, lora = config.policy.megatron, config.model.lora
    tensor, pipeline = layout.tensor_parallel, layout.pipeline_parallel
    layers = layers_of(layout, sizes.layers, stage)
    sparse = sizes.sparse / sizes.layers * layers
    hidden, q, kv = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    maps = {
        **{"q_proj": (hidden, q, True), "k_proj": (hidden, kv, True), "v_proj": (hidden, kv, True)},
        "o_proj": (q, hidden, False),
    }
    mlp = {
        **{"gate_proj": (hidden, sizes.intermediate, True), "up_proj": (hidden, sizes.intermediate, True)},
        "down_proj": (sizes.intermediate, hidden, False),
    }
    attention = sum(a * b for a, b, _ in maps.values()) / tensor
    dense_mlp = sum(a * b for a, b, _ in mlp.values()) / tensor
    vectors = 2 * hidden + (2 * sizes.head_dim if sizes.head_norms else 0)
    table = sizes.vocabulary * hidden / tensor
    first, last = stage == 0, stage == pipeline - 1
    tables = table * (int(first) + int(last and not (sizes.tied and first)))
    dense = layers * (attention + vectors) + (layers - sparse) * dense_mlp + tables
    dense += sparse * sizes.experts * hidden + (hidden if last else 0)
    adapters = 0.0
    for name, (inner, outer, by_rows) in (maps | mlp | {"lm_head": (hidden, sizes.vocabulary, True)}).items():
        if lora is not None and name in lora.targets:
            count = int(last) if name == "lm_head" else layers - sparse if name in mlp else layers
            cut, whole = (outer, inner) if by_rows else (inner, outer)
            adapters += count * lora.rank * (cut / tensor + whole)
    return Held(
        layers=layers,
        dense=dense,
        experts=sparse * sizes.experts / layout.expert_parallel * sizes.expert,
        largest=max(table if first or last else 0.0, 2 * hidden * sizes.intermediate / tensor),
        adapters=adapters,
    )


def layer_bytes(config: Config, sizes: Sizes, *, sparse: bool) -> float:
    """What a layer keeps of one token of a micro-batch for its backward pass, without recomputation.

    Norms keep their input in float32, their result and, to train their weight, what it multiplies; the gated MLP four
    tensors of its inner width, for each expert that the token is sent to.
    """
    layout, item = config.policy.megatron, itemsize(config.policy.param_dtype)
    tensor = layout.tensor_parallel
    by_rows = tensor if layout.sequence_parallel else 1
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    normed = FLOAT if config.model.lora is not None else FLOAT + item
    norms = 2 * sizes.hidden * (normed + item) / by_rows
    head_norms = (q + kv) * normed / tensor if sizes.head_norms else 0
    # Rotated queries and keys, the values as a view of the product that holds all three, and the result. Context
    # parallelism gathers the keys and values of all rows.
    gathered = 2 * kv * layout.context_parallel if layout.context_parallel > 1 else 0
    attention = (item * (3 * q + 3 * kv + gathered) + FLOAT * sizes.heads) / tensor
    if not sparse:
        return norms + head_norms + attention + 4 * item * sizes.intermediate / tensor
    # The tokens of a rank go to as many elsewhere as come here from there, if the experts are equally busy.
    sent = sizes.experts_per_token * item * (2 * sizes.hidden + 4 * sizes.expert_width) / by_rows
    return norms + head_norms + attention + sent + 2 * FLOAT * sizes.experts / by_rows


def _stage(config: Config, sizes: Sizes, world: int, stage: int) -> Training:
    layout, item = config.policy.megatron, itemsize(config.policy.param_dtype)
    tensor, pipeline = layout.tensor_parallel, layout.pipeline_parallel
    held = weights_of(config, sizes, stage)
    copies = world / (tensor * pipeline), world / (pipeline * layout.expert_parallel)  # of dense weights, of experts
    lora = config.model.lora is not None
    weights = {"weights": item * (held.dense + held.experts) + FLOAT * held.adapters}
    kl = config.algorithm.kl
    if kl is not None and (kl.reference is not None or not lora):
        weights["reference"] = item * (held.dense + held.experts)
    trained = held.adapters if lora else held.dense + held.experts
    share = held.adapters / copies[0] if lora else held.dense / copies[0] + held.experts / copies[1]
    # Weights of two bytes have masters of four in the optimizer; adapters have four themselves.
    kept = 2 * FLOAT if lora or item == FLOAT else 3 * FLOAT
    return Training(
        held={**weights, "gradients (float32)": FLOAT * trained},
        moments={"optimizer": kept * share},
        update=_update(config, sizes, held, stage),
        step={"optimizer's scratch": FLOAT * share},
    )


def _update(config: Config, sizes: Sizes, held: Held, stage: int) -> dict[str, float]:
    """Activations of the micro-batches in flight, as many as stages follow and this one, and the scratch of a layer's
    backward pass or the head's."""
    layout, policy, item = config.policy.megatron, config.policy, itemsize(config.policy.param_dtype)
    tensor, pipeline = layout.tensor_parallel, layout.pipeline_parallel
    by_rows = tensor if layout.sequence_parallel else 1
    tokens = policy.microbatch_tokens / layout.context_parallel
    lora = config.model.lora is not None
    dense, sparse = (layer_bytes(config, sizes, sparse=kind) for kind in (False, True))
    layers, of_experts = held.layers, sizes.sparse / sizes.layers * held.layers
    whole = (layers - of_experts) * dense + of_experts * sparse
    entry = item * sizes.hidden / by_rows
    kept = layers * entry if policy.activation_checkpointing else whole
    widest = max(dense if of_experts < layers else 0, sparse if of_experts else 0)
    again = widest if policy.activation_checkpointing else 0
    inner = sizes.experts_per_token * sizes.expert_width / by_rows if of_experts else sizes.intermediate / tensor
    gathered = 2 * item * sizes.hidden if by_rows > 1 else 0  # the whole input of a linear, and its gradient
    scratch = tokens * (again + item * (3 * inner + 2 * sizes.hidden / by_rows) + gathered)
    if stage == pipeline - 1:
        learnt = SHARE_LEARNT * tokens
        head = (
            learnt * sizes.hidden * (item + FLOAT)
            + 2 * HEAD_STRIP
            + (tokens * item * sizes.hidden if tensor > 1 else 0)
        )
        scratch = max(scratch, head)
    return {
        "activations": tokens * kept * in_flight(layout, stage),
        "backward scratch": scratch,
        "gradients not yet added": 0.0 if lora else item * held.largest,
    }
