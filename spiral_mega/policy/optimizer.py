"""AdamW as `optimizer` in the configuration describes it. Its learning rate is in lr_schedule.py."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from spiral_mega.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Build AdamW over those of `parameters` that require a gradient; vectors (norms, biases) get no weight decay."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in trainable if parameter.ndim >= 2],
            "weight_decay": config.weight_decay,
        },
        {
            "params": [parameter for parameter in trainable if parameter.ndim < 2],
            "weight_decay": 0.0,
        },
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    for parameter in trainable:
        # torch.distributed.checkpoint would fill an empty state by a step of its own, which Adam
        # would count.
        moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return optimizer


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the moments to `device`; the step counts stay."""
    for state in optimizer.state.values():
        for name in MOMENTS:
            state[name] = state[name].to(device)
