"""The policy's weights into the engine, and a canary that shows when they did not arrive.

It tells dummy, partial and scrambled weights, and another model, from the right ones at any bound. An engine that is
one small update behind differs by little more than rounding: only a tight `max_sync_gap` shows that.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from spiral_mega.config import Config
from spiral_mega.distributed import max_over_ranks
from spiral_mega.errors import UserError
from spiral_mega.packing.sequences import Sequence
from spiral_mega.policy import Policy
from spiral_mega.rollout.engine import Request, RolloutEngine
from spiral_mega.runtime import Runtime

CANARY_TOKENS = 16


class SyncError(UserError):
    """The engine does not sample from the policy's weights."""


class WeightSync:
    """Streams weights and compares, on a response to `prompt_ids`, the engine's log-probs with the policy's.

    With `rollout.lora` "adapter" the weights go once, without adapters, and the adapters each time.
    """

    def __init__(
        self, policy: Policy, engine: RolloutEngine, prompt_ids: Seq[int], config: Config, runtime: Runtime
    ) -> None:
        self.policy, self.engine, self.runtime = policy, engine, runtime
        self.max_gap = config.rollout.max_sync_gap
        self.dtype = getattr(torch, config.policy.param_dtype)
        self.adapter, self.base_sent = config.rollout.lora == "adapter", False
        self.sleeps = config.rollout.sleep
        self._request = Request(("canary",), list(prompt_ids), 1, 0, CANARY_TOKENS)

    def release(self) -> None:
        """Sampling is over until the next sync: the engine leaves the device to the policy, if it is to."""
        if self.sleeps:
            self.engine.sleep()

    def __call__(self) -> dict[str, float]:
        """Sync, check and return the gap; collective. Raises SyncError on every rank when that of any is too large."""
        self.runtime.empty_cache()  # the engine takes its memory from the device, not from torch
        if not self.base_sent:
            self.engine.load_weights(self.policy.weights(self.dtype, merge=not self.adapter))
        if self.adapter:
            self.base_sent = True
            self.engine.load_adapter(self.policy.adapter())
        gap = max_over_ranks({"gap": self._gap()})["gap"]
        if not gap <= self.max_gap:
            raise SyncError(
                f"after a weight sync the engine's log-probs differ from the policy's by {gap:.3g}, more than "
                f"rollout.max_sync_gap ({self.max_gap}): its weights are stale or partial, or it computes another "
                "model. Nothing was trained on its samples"
            )
        return {"sampler/canary_gap": gap}

    def _gap(self) -> float:
        self.engine.add(self._request)
        samples = []
        while self.engine.has_unfinished():
            samples += self.engine.step()
        (sample,) = samples
        canary = Sequence((0, 0), self._request.prompt_ids, sample.token_ids, sample.logprobs, 0.0, 0.0)
        difference = self.policy.logprobs([canary]).cpu() - torch.tensor(sample.logprobs)
        # NaN counts as infinitely far, not as smaller than the bound.
        return float(difference.abs().nan_to_num(nan=float("inf")).max())


class NoSync:
    """In place of WeightSync where there is no engine."""

    def release(self) -> None:
        pass

    def __call__(self) -> dict[str, float]:
        return {}
