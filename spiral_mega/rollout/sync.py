"""The policy's weights into the engine, and a canary that shows when they did not arrive.

It tells dummy, partial and scrambled weights, and another model, from the right ones at any bound. An engine that is
one small update behind differs by little more than rounding: only a tight `max_sync_gap` shows that.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from spiral_mega.config import Config
from spiral_mega.config.model_set import metric_key
from spiral_mega.distributed.collectives import max_over_ranks
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.policy import FrozenPolicy
from spiral_mega.rollout.engine import Request, RolloutEngine

CANARY_TOKENS = 16


class SyncError(UserError):
    """The engine does not sample from the policy's weights."""


class WeightSync:
    """Streams weights and compares, on a response to `prompt_ids`, the engine's log-probs with the policy's.

    With `rollout.sync.lora` "adapter" the weights go once, without adapters, and the adapters each time. What is `frozen`
    goes once, unless the engine loses it in its sleep.
    """

    def __init__(
        self,
        policy: FrozenPolicy,
        engine: RolloutEngine,
        prompt_ids: Seq[int],
        config: Config,
        runtime: Runtime,
        *,
        frozen: bool = False,
    ) -> None:
        self.policy, self.engine, self.runtime = policy, engine, runtime
        self.max_logprob_gap = config.rollout.sync.max_logprob_gap
        self.dtype = getattr(torch, config.policy.param_dtype)
        self.adapter, self.base_sent = config.rollout.sync.lora == "adapter", False
        self.sleeps = config.rollout.engine.sleep
        self.once, self.sent = frozen and not self.sleeps, False
        self._request = Request(("canary",), list(prompt_ids), 1, 0, CANARY_TOKENS)

    def release(self) -> None:
        """Sampling is over until the next sync: the engine leaves the device to the policy, if it is to."""
        if self.sleeps:
            self.engine.sleep()

    def __call__(self) -> dict[str, float]:
        """Sync, check and return the gap; collective. Raises SyncError on every rank when that of any is too large."""
        if not (self.once and self.sent):
            self._send()
            self.sent = True
        gap = max_over_ranks({"gap": self._gap()})["gap"]
        if not gap <= self.max_logprob_gap:
            raise SyncError(
                f"after a weight sync the engine's log-probs differ from the policy's by {gap:.3g}, more than "
                f"rollout.sync.max_logprob_gap ({self.max_logprob_gap}): its weights are stale or partial, or it computes "
                "another model. Nothing was trained on its samples"
            )
        return {"sampler/canary_gap": gap}

    def _send(self) -> None:
        self.runtime.empty_cache()  # the engine takes its memory from the device, not from torch
        if not self.base_sent:
            self.engine.load_weights(self.policy.weights(self.dtype, merge=not self.adapter))
        if self.adapter:
            self.base_sent = True
            self.engine.load_adapter(self.policy.adapter())

    def _gap(self) -> float:
        self.engine.add(self._request)
        samples = []
        while self.engine.has_unfinished():
            samples += self.engine.step()
        (sample,) = samples
        canary = TrainingSequence(
            SequenceKey(0, 0), self._request.prompt_ids, sample.token_ids, sample.logprobs, 0.0, 0.0
        )
        difference = self.policy.logprobs([canary]).cpu() - torch.tensor(sample.logprobs)
        # NaN counts as infinitely far, not as smaller than the bound.
        return float(difference.abs().nan_to_num(nan=float("inf")).max())


class Syncs:
    """One sync for each model, each with its own canary; none where there is no engine."""

    def __init__(self, by_model: Mapping[str, WeightSync]) -> None:
        self.by_model = dict(by_model)

    def release(self) -> None:
        """As WeightSync's."""
        for sync in self.by_model.values():
            sync.release()

    def __call__(self) -> dict[str, float]:
        """As WeightSync's, the gaps by model."""
        return {metric_key(gap, model): value for model, sync in self.by_model.items() for gap, value in sync().items()}
