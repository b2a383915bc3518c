"""megatron-core's distributed AdamW: settings, update, and the state that this rank saves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import nn

from spiral_mega.config import OptimizerConfig
from spiral_mega.policy.lr_schedule import lr_factor
from spiral_mega.policy.megatron.checkpoint_state import (
    Piece,
    Rectangle,
    ShardRectangle,
    TensorPieces,
    cut_by_blocks,
    rectangles,
)
from spiral_mega.policy.megatron.families import ParamMapping
from spiral_mega.policy.megatron.megatron_model import TreeGPTModel
from spiral_mega.policy.megatron.megatron_weights import LocalParam, ShardMap


def wrap_ddp(stages: list[TreeGPTModel]) -> list[DistributedDataParallel]:
    """Wrap stages in flat gradient buffers, summed over replicas and not averaged (calculate_per_token_loss)."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    return [DistributedDataParallel(stage.config, settings, stage).train() for stage in stages]


class OptimizerShard(NamedTuple):
    """This rank's part of a parameter: the flat range [start, stop), as the `main` parameter of
    `optimizer`.

    `main` is None if the rank has none of it.
    """

    optimizer: Any
    main: nn.Parameter | None
    start: int
    stop: int


class DistributedAdamW:
    """AdamW whose state is sharded over the replicas; vectors (norms, biases) are never decayed."""

    def __init__(
        self,
        stages: list[DistributedDataParallel],
        config: OptimizerConfig,
        total_updates: int,
    ) -> None:
        self.stages, self.config, self.total_updates, self.updates = (
            stages,
            config,
            total_updates,
            0,
        )
        self._steps = 0  # updates that were not skipped
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.max_grad_norm,
            bf16=stages[0].config.bf16,
            params_dtype=stages[0].config.params_dtype,
            use_distributed_optimizer=True,
        )
        self.inner = get_megatron_optimizer(settings, stages, use_gloo_process_groups=False)
        self._initialize_state()

    @property
    def lr(self) -> float:
        return self.config.lr * lr_factor(self.config, self.total_updates, self.updates)

    def grad_norm(self) -> float:
        """Prepare the gradient for `step` and return its norm over all ranks, not finite if it is not. Collective."""
        self.inner.prepare_grads()
        return float(self.inner.get_grad_norm())

    def step(self, norm: float) -> None:
        """Clip the gradient, whose norm is `norm`, and update. Collective."""
        for group in self.inner.param_groups:  # megatron-core leaves both to its own scheduler
            group["lr"] = self.lr
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        scale = self.config.max_grad_norm / (norm + 1e-6)
        if scale < 1.0:
            self._scale_gradients(scale)
        self.inner.step_with_ready_grads()
        self._steps += 1

    def state_dict(self, shards: ShardMap) -> dict[str, Any]:
        """Return float32 weights and moments by Hugging Face name, as pieces on this rank (checkpoint_state.py)."""
        state: dict[str, dict[str, TensorPieces]] = {
            kind: {} for kind in ("param", "exp_avg", "exp_avg_sq")
        }
        for local in shards.local_params:
            optimizer, main, start, stop = self.local_shard(local.parameter)
            if main is None:
                continue
            found = _shard_rectangles(shards, local, start, stop)
            for kind, tensors in state.items():
                values = main if kind == "param" else optimizer.optimizer.state[main][kind]
                tensors |= _named_pieces(shards, local.mapping, found, values.detach().view(-1))
        return {**state, "updates": self.updates, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Apply `state`, whose weights and moments were already filled in place. Collective."""
        self.updates, self._steps = state["updates"], state["steps"]
        self._initialize_state()
        for optimizer in self.inner.chained_optimizers:
            optimizer._copy_main_params_to_model_params()
        for stage in self.stages:
            stage.start_param_sync(force_sync=True)

    def local_shard(self, parameter: nn.Parameter) -> OptimizerShard:
        """Return what this rank's optimizer has of `parameter`."""
        dense, *experts = self.inner.chained_optimizers
        optimizer = dense if getattr(parameter, "allreduce", True) else experts[0]
        if parameter not in optimizer.model_param_group_index_map:
            return OptimizerShard(optimizer, None, 0, 0)
        group, index = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][index]
        flat_range = optimizer._get_model_param_range_map(parameter)["param"]
        return OptimizerShard(optimizer, main, flat_range.start, flat_range.end)

    def _scale_gradients(self, scale: float) -> None:
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    def _initialize_state(self) -> None:
        """Create moments of zero where there are none yet, and set the step count wherever it is kept."""
        for optimizer in self.inner.chained_optimizers:
            torch_adam = isinstance(optimizer.optimizer, torch.optim.AdamW)
            for group in optimizer.optimizer.param_groups:
                if not torch_adam:  # transformer-engine's fused Adam counts once for all parameters
                    group["step"] = self._steps
                for parameter in group["params"]:
                    state = optimizer.optimizer.state[parameter]
                    for moment in ("exp_avg", "exp_avg_sq"):
                        state.setdefault(moment, torch.zeros_like(parameter))
                    if torch_adam:
                        state["step"] = torch.tensor(float(self._steps))


def _shard_rectangles(
    shards: ShardMap,
    local: LocalParam,
    start: int,
    stop: int,
) -> list[ShardRectangle]:
    """Cut the flat range [start, stop) of a parameter into rectangles of its Hugging Face shards."""
    columns = local.parameter.shape[1] if local.parameter.dim() > 1 else 1
    blocks = shards.row_blocks(local.mapping)
    found: list[ShardRectangle] = []
    for rectangle in rectangles(start, stop, columns):
        found += cut_by_blocks(rectangle, blocks)
    return found


def _named_pieces(
    shards: ShardMap, mapping: ParamMapping, found: list[ShardRectangle], values: torch.Tensor
) -> dict[str, TensorPieces]:
    """Return pieces of the mapping's tensors that this rank holds.

    `values` are those of its flat range.
    """
    named = {}
    for number, name in enumerate(mapping.hf_names):
        pieces = [
            _piece(shards, mapping, name, rectangle, values)
            for shard, rectangle in found
            if shard == number
        ]
        if pieces:
            named[name] = TensorPieces(
                shards.shapes[name], pieces, saves=shards.is_source(mapping, name)
            )
    return named


def _piece(
    shards: ShardMap,
    mapping: ParamMapping,
    name: str,
    rectangle: Rectangle,
    values: torch.Tensor,
) -> Piece:
    """Place a rectangle of this rank's shard in the whole tensor `name`."""
    shard = shards.shard(mapping, name)
    row = rectangle.row + (shard.start if shard.dim == 0 else 0)
    own = values[rectangle.start : rectangle.start + rectangle.rows * rectangle.columns]
    if len(shards.shapes[name]) == 1:
        return Piece((row,), own)
    column = rectangle.column + (shard.start if shard.dim == 1 else 0)
    return Piece((row, column), own.view(rectangle.rows, rectangle.columns))
