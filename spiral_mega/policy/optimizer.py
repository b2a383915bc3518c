"""AdamW and its learning-rate schedule, as the config describes them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from spiral_mega.config import OptimizerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over those of `parameters` that are trained; vectors (norms, biases) are never decayed."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps
    )
    for p in trainable:
        # Left to itself, torch.distributed.checkpoint fills an empty state by a step, which Adam would count.
        moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
    return optimizer


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Put the moments (not the step counts) on `device`."""
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(device)


def schedule_factor(config: OptimizerConfig, total_updates: int, update: int) -> float:
    """What the learning rate is multiplied by at `update`, counted from 0.

    Linear warm-up over `warmup_steps` updates, then constant, or linear or cosine decay to 0 at the end.
    """
    warm = min(1.0, (update + 1) / (config.warmup_steps + 1))
    left = 1.0 - min(1.0, max(0, update - config.warmup_steps) / max(1, total_updates - config.warmup_steps))
    decay = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1.0 - math.cos(math.pi * left))}
    return warm * decay[config.schedule]


def make_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_updates: int) -> LambdaLR:
    """`schedule_factor` applied to `optimizer`."""
    return LambdaLR(optimizer, partial(schedule_factor, config, total_updates))
