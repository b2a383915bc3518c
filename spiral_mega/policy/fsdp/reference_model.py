"""The frozen model that `algorithm.kl` is measured against: the policy without its adapters, or a second model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from spiral_mega.config import Config, ModelConfig
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.packing.tree_batch import TreeBatch
from spiral_mega.policy.fsdp.sharded_model import build_model
from spiral_mega.policy.lora import disable_adapters
from spiral_mega.policy.reference_path import reference_path


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """Computes log-probs of `model`, inside the context `frozen`, at the sampling temperature."""

    model: Any
    frozen: Callable[[], AbstractContextManager[None]]
    temperature: float

    @torch.no_grad()
    def logprobs(self, batch: TreeBatch) -> torch.Tensor:
        """Compute log-probs [U] of the distinct response tokens; collective."""
        with self.frozen():
            logprobs, _ = self.model.logprobs(batch, self.temperature)
        self.model.reshard()  # or FSDP keeps the root unsharded into the policy's forward
        return logprobs


def build_reference(policy: Any, config: Config, runtime: Runtime) -> ReferenceModel | None:
    """Build the reference of `config.algorithm.kl`, None without it; `policy` is the sharded model
    that is trained.

    Without a path the reference is the model that training starts from: with LoRA the policy's own
    base weights, else a second copy, sharded as the policy is. Raises ConfigError for a model of
    another vocabulary.
    """
    temperature = config.rollout.sampling.temperature
    if config.algorithm.kl is None:
        return None
    path = reference_path(config)
    if path is None:
        return ReferenceModel(policy, partial(disable_adapters, policy), temperature)
    model = build_model(ModelConfig(path=path), config.policy, runtime, config.run.seed)
    return ReferenceModel(model.requires_grad_(False), nullcontext, temperature)
