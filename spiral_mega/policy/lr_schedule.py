"""The learning-rate schedule: linear warm-up, then constant, or linear or cosine decay to 0."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR

from spiral_mega.config import OptimizerConfig


def lr_factor(config: OptimizerConfig, total_updates: int, update: int) -> float:
    """Return the factor of the learning rate at `update`, counted from 0.

    It rises linearly over `warmup_steps` updates; a decay reaches 0 after `total_updates`.
    """
    warmup = min(1.0, (update + 1) / (config.warmup_steps + 1))
    decayed = max(0, update - config.warmup_steps) / max(1, total_updates - config.warmup_steps)
    left = 1.0 - min(1.0, decayed)
    decay = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1.0 - math.cos(math.pi * left))}
    return warmup * decay[config.schedule]


def make_lr_schedule(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_updates: int
) -> LambdaLR:
    """Apply `lr_factor` to `optimizer`, one step of the schedule for each update."""
    return LambdaLR(optimizer, partial(lr_factor, config, total_updates))
