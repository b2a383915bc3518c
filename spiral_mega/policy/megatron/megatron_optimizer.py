"""megatron-core's distributed AdamW: its settings, and one parameter's share of it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import nn

from spiral_mega.config import OptimizerConfig
from spiral_mega.policy.megatron.checkpoint_state import Pieces, Rectangle, cut_by_blocks, rectangles
from spiral_mega.policy.megatron.families import Entry
from spiral_mega.policy.megatron.megatron_model import TreeGPTModel
from spiral_mega.policy.megatron.megatron_weights import ShardMap
from spiral_mega.policy.optimizer import schedule_factor


def wrap(stages: list[TreeGPTModel]) -> list[DistributedDataParallel]:
    """Each with flat buffers whose gradients are summed over replicas, not averaged (calculate_per_token_loss)."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [DistributedDataParallel(stage.config, settings, stage).train() for stage in stages]


class DistributedAdamW:
    """AdamW whose state is cut over the replicas; vectors (norms, biases) are never decayed."""

    def __init__(self, stages: list[DistributedDataParallel], config: OptimizerConfig, total_updates: int) -> None:
        self.stages, self.config, self.total_updates, self.updates = stages, config, total_updates, 0
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
        self._fill_state()

    @property
    def lr(self) -> float:
        return self.config.lr * schedule_factor(self.config, self.total_updates, self.updates)

    def norm(self) -> float:
        """Of the whole gradient, which is made ready for `step`; not finite when some gradient is not. Collective."""
        self.inner.prepare_grads()
        return float(self.inner.get_grad_norm())

    def step(self, norm: float) -> None:
        """Clip the gradient, of norm `norm`, and update; collective."""
        for group in self.inner.param_groups:  # megatron-core leaves both to a scheduler of its own
            group["lr"] = self.lr
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        scale = self.config.max_grad_norm / (norm + 1e-6)
        if scale < 1.0:
            for group in self.inner.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale)
        self.inner.step_with_ready_grads()
        self._steps += 1

    def state_dict(self, shards: ShardMap) -> dict[str, Any]:
        """Float32 weights and moments by Hugging Face name, what this rank has of them; see state.py."""
        state: dict[str, dict[str, Pieces]] = {kept: {} for kept in ("param", "exp_avg", "exp_avg_sq")}
        for entry, parameter in shards.owned:
            optimizer, main, start, stop = self.share(parameter)
            if main is None:
                continue
            blocks = shards.blocks(entry)
            columns = parameter.shape[1] if parameter.dim() > 1 else 1
            found = [each for whole in rectangles(start, stop, columns) for each in cut_by_blocks(whole, blocks)]
            for kept, pieces in state.items():
                values = (main if kept == "param" else optimizer.optimizer.state[main][kept]).detach().view(-1)
                for i, name in enumerate(entry.theirs):
                    mine = [_piece(shards, entry, i, each, values) for number, each in found if number == i]
                    if mine:
                        pieces[name] = Pieces(shards.shapes[name], mine, written=shards.is_first(entry, name))
        return {**state, "updates": self.updates, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take on `state`, of which the weights and moments were filled in place; collective."""
        self.updates, self._steps = state["updates"], state["steps"]
        self._fill_state()
        for optimizer in self.inner.chained_optimizers:
            optimizer._copy_main_params_to_model_params()
        for stage in self.stages:
            stage.start_param_sync(force_sync=True)

    def share(self, parameter: nn.Parameter) -> tuple[Any, nn.Parameter | None, int, int]:
        """The optimizer that has `parameter`, and what this rank has of it: a flat share [start, stop), or None."""
        dense, *experts = self.inner.chained_optimizers
        optimizer = dense if getattr(parameter, "allreduce", True) else experts[0]
        if parameter not in optimizer.model_param_group_index_map:
            return optimizer, None, 0, 0
        group, index = optimizer.model_param_group_index_map[parameter]
        share = optimizer._get_model_param_range_map(parameter)["param"]
        return optimizer, optimizer.optimizer.param_groups[group]["params"][index], share.start, share.end

    def _fill_state(self) -> None:
        """Moments of zero where there are none yet, and the count of steps in every place that keeps it."""
        for optimizer in self.inner.chained_optimizers:
            torch_adam = isinstance(optimizer.optimizer, torch.optim.AdamW)
            for group in optimizer.optimizer.param_groups:
                if not torch_adam:  # the fused one of transformer-engine counts for all parameters at once
                    group["step"] = self._steps
                for parameter in group["params"]:
                    state = optimizer.optimizer.state[parameter]
                    for moment in ("exp_avg", "exp_avg_sq"):
                        state.setdefault(moment, torch.zeros_like(parameter))
                    if torch_adam:
                        state["step"] = torch.tensor(float(self._steps))


def _piece(
    shards: ShardMap, entry: Entry, number: int, piece: Rectangle, values: torch.Tensor
) -> tuple[tuple[int, ...], torch.Tensor]:
    """A rectangle of the part numbered `number`: its offsets in the whole tensor, and a view of its values."""
    name = entry.theirs[number]
    part = shards.part(entry, name)
    row = piece.row + (part.start if part.dim == 0 else 0)
    mine = values[piece.start : piece.start + piece.rows * piece.columns]
    if len(shards.shapes[name]) == 1:
        return (row,), mine
    return (row, piece.column + (part.start if part.dim == 1 else 0)), mine.view(piece.rows, piece.columns)
