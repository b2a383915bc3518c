"""The frozen policy that `algorithm.kl` is measured to: the adapters switched off, or a model of its own."""

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
from spiral_mega.policy.kl_reference import reference_path
from spiral_mega.policy.lora import adapters_off


@dataclass(frozen=True, slots=True)
class Reference:
    """`model` under `frozen`, at the sampler's temperature."""

    model: Any
    frozen: Callable[[], AbstractContextManager[None]]
    temperature: float

    @torch.no_grad()
    def logprobs(self, batch: TreeBatch) -> torch.Tensor:
        """Log-probs [U] of the distinct response tokens; collective."""
        with self.frozen():
            logprobs, _ = self.model.logprobs(batch, self.temperature)
        self.model.reshard()  # what is kept whole until a backward would, in the policy's forward, still be there
        return logprobs


def make_reference(policy: Any, config: Config, runtime: Runtime) -> Reference | None:
    """The reference of `config.algorithm.kl`, or None without one; `policy` is the sharded model that is trained.

    Without a path it is the model that training starts from: with LoRA the policy's own base weights, else a second
    copy, sharded as the policy is. Raises ConfigError for a model of another vocabulary.
    """
    temperature = config.rollout.sampling.temperature
    if config.algorithm.kl is None:
        return None
    if (path := reference_path(config)) is None:
        return Reference(policy, partial(adapters_off, policy), temperature)
    model = build_model(ModelConfig(path=path), config.policy, runtime, config.run.seed)
    return Reference(model.requires_grad_(False), nullcontext, temperature)
