"""Syncs the policy's weights into the engine, and checks on one canary response that they arrived.

    release()   engine sleeps, if rollout.engine.sleep
    ...         the policy updates
    __call__()  empty torch's cache -> base weights (once, with adapters) -> adapters -> check

The check compares the log-probs of engine and policy on a response to a canary prompt. At any bound
it detects dummy, partial and scrambled weights, and another model. An engine that is one small
update behind differs by little more than rounding, which only a tight
`rollout.sync.max_logprob_gap` detects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from spiral_mega.config import Config
from spiral_mega.config.model_set import metric_key
from spiral_mega.distributed.collectives import max_over_ranks
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.policy import FrozenPolicy
from spiral_mega.rollout.engine import Request, RequestKey, RolloutEngine, Sample
from spiral_mega.traces import SEARCH

CANARY_KEY = RequestKey(episode=-1, component=SEARCH)  # belongs to no episode
CANARY_TOKENS = 16


class SyncError(UserError):
    """The engine does not sample from the policy's weights."""


class WeightSync:
    """Streams weights into the engine, then compares log-probs on a response to `prompt_ids`.

    With `rollout.sync.lora` "adapter" the base weights are sent once and the adapters at each sync.
    A `frozen` model is sent once, unless the engine loses its weights in sleep.
    """

    def __init__(
        self,
        policy: FrozenPolicy,
        engine: RolloutEngine,
        prompt_ids: Sequence[int],
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
        self._request = Request(
            CANARY_KEY, list(prompt_ids), num_samples=1, seed=0, max_tokens=CANARY_TOKENS
        )

    def release(self) -> None:
        """Let the engine free the device's memory until the next sync, if it is set to sleep."""
        if self.sleeps:
            self.engine.sleep()

    def __call__(self) -> dict[str, float]:
        """Sync and check; return the log-prob gap as a metric. Collective.

        Raises SyncError on every rank if the gap of any is too large.
        """
        if not (self.once and self.sent):
            self._send()
            self.sent = True
        gap = max_over_ranks({"gap": self._logprob_gap()})["gap"]
        if not gap <= self.max_logprob_gap:
            raise SyncError(
                "after a weight sync the engine's log-probs differ from the policy's by "
                f"{gap:.3g}, more than rollout.sync.max_logprob_gap ({self.max_logprob_gap}): its "
                "weights are stale or partial, or it computes another model. Nothing was trained "
                "on its samples"
            )
        return {"sync/logprob_gap": gap}

    def _send(self) -> None:
        self.runtime.empty_cache()  # the engine allocates from the device, not from torch's cache
        if not self.base_sent:
            self.engine.load_weights(self.policy.weights(self.dtype, merge=not self.adapter))
        if self.adapter:
            self.base_sent = True
            self.engine.load_adapter(self.policy.adapter())

    def _logprob_gap(self) -> float:
        """Return the largest difference between the log-probs of engine and policy on a response."""
        sample = self._sample_response()
        response = TrainingSequence(
            key=SequenceKey(0, 0),
            prompt_ids=self._request.prompt_ids,
            response_ids=sample.token_ids,
            sampler_logprobs=sample.logprobs,
            advantage=0.0,
            weight=0.0,
        )
        difference = self.policy.logprobs([response]).cpu() - torch.tensor(sample.logprobs)
        # NaN counts as infinite, as it would pass any bound.
        return float(difference.abs().nan_to_num(nan=float("inf")).max())

    def _sample_response(self) -> Sample:
        self.engine.add(self._request)
        samples: list[Sample] = []
        while self.engine.has_unfinished():
            samples += self.engine.step()
        (sample,) = samples
        return sample


class Syncs:
    """One sync for each model, each with its own check; empty where there is no engine."""

    def __init__(self, by_model: Mapping[str, WeightSync]) -> None:
        self.by_model = dict(by_model)

    def release(self) -> None:
        """See WeightSync.release."""
        for sync in self.by_model.values():
            sync.release()

    def __call__(self) -> dict[str, float]:
        """See WeightSync; the metrics are by model."""
        metrics = {}
        for model, sync in self.by_model.items():
            for name, value in sync().items():
                metrics[metric_key(name, model)] = value
        return metrics
