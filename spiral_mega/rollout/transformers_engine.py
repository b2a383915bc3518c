"""The embedded engine: batched sampling with a KV cache on a plain transformers model. No server, no extra package.

It decodes one batch to its end, a token a step, before it takes the next. For throughput on GPUs use an engine with
continuous batching.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from spiral_mega.config import Config
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.models.tensor_names import checkpoint_tensors
from spiral_mega.models.weights import checked_weights
from spiral_mega.rollout.decoding import ATTENTION, growing_cache
from spiral_mega.rollout.engine import Replica, Request, Sample
from spiral_mega.rollout.sampling import sample_tokens, trace_uniforms
from spiral_mega.traces import FinishReason


@dataclass(slots=True)
class _Row:
    request: Request
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0


@dataclass(slots=True)
class _Batch:
    """Rows [B] that decode together: all at the same `position`, some of them finished.

    `mask` [B, cached] tells real tokens from padding; `logits` [B, V] are those of the next token.
    """

    rows: list[_Row]
    cache: DynamicCache
    mask: torch.Tensor
    logits: torch.Tensor
    position: int = 0


class TransformersEngine:
    """Samples from `model` [vocabulary V] on its own device.

    `stop_ids` end a response and are kept in it, also where the padding token is the same. Raises UserError for a
    model whose cache is more than keys and values (state-space and linear attention layers).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        stop_ids: Iterable[int],
        max_num_seqs: int,
        replica: Replica | None = None,
    ) -> None:
        self.replica = replica or Replica()
        self.model = model.eval().requires_grad_(False)
        self.device = next(model.parameters()).device
        self.temperature = temperature
        self.stop_ids = frozenset(stop_ids)
        self.max_num_seqs = max_num_seqs
        self._queue: list[_Row] = []
        self._batch: _Batch | None = None
        self._half_loaded = False
        _check_cache(model)
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(ATTENTION)

    def add(self, request: Request) -> None:
        if not request.prompt_ids or request.max_tokens < 1 or request.num_samples < 1:
            raise ValueError(f"request {request.key!r} needs a prompt, max_tokens >= 1 and num_samples >= 1")
        self._queue += [_Row(request, index) for index in range(request.num_samples)]

    def abort(self, keys: Collection[tuple[Any, ...]]) -> None:
        self._queue = [row for row in self._queue if row.request.key not in keys]
        rows = self._batch.rows if self._batch is not None else []
        for row in rows:
            if row.request.key in keys:
                row.finish = row.finish or "length"  # it leaves the batch unreported
        if all(row.finish is not None for row in rows):
            self._batch = None

    def has_unfinished(self) -> bool:
        return bool(self._queue) or self._batch is not None

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """Decode one token of every row of the batch."""
        if self._half_loaded:
            raise RuntimeError("the last load_weights failed half-way: load a whole set of weights before sampling")
        if self._batch is None:
            if not self._queue:
                return []
            self._queue.sort(key=lambda row: row.request.priority)  # stable: equals keep their order
            self._batch = self._prefill(self._queue[: self.max_num_seqs])
            del self._queue[: self.max_num_seqs]
        batch = self._batch
        tokens, samples = self._sample(batch)
        running = [slot for slot, row in enumerate(batch.rows) if row.finish is None]
        if running:
            self._forward_tokens(batch, tokens, running)
        else:
            self._batch = None
        return samples

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = ((name, each.detach()) for name, each in self.model.named_parameters(remove_duplicate=False))
        targets = dict(checkpoint_tensors(self.model.config.model_type, parameters))
        shapes = {name: target.shape for name, target in targets.items()}
        self._half_loaded = True
        with torch.no_grad():
            for name, tensor in checked_weights(weights, shapes):
                targets[name].copy_(tensor)
        self._half_loaded = False

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise NotImplementedError("the embedded engine takes merged weights: set rollout.sync.lora=merge")

    def reset_prefix_cache(self) -> None:
        pass  # no cache outlives its batch

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        self._queue.clear()
        self._batch = None

    def _prefill(self, rows: list[_Row]) -> _Batch:
        """Run each distinct prompt once (left-padded) and repeat its cache for every row that shares it."""
        requests = list({id(row.request): row.request for row in rows}.values())
        for before, row in pairwise(rows):
            row.cached_tokens = len(row.request.prompt_ids) if row.request is before.request else 0
        width = max(len(request.prompt_ids) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros(len(requests), width, dtype=torch.long)
        for i, request in enumerate(requests):
            ids[i, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[i, width - len(request.prompt_ids) :] = 1
        cache = growing_cache(self.model.config)
        mask = mask.to(self.device)
        logits = self._forward(ids.to(self.device), mask, cache)
        slots = {id(request): i for i, request in enumerate(requests)}
        repeat = torch.tensor([slots[id(row.request)] for row in rows], device=self.device)
        cache.batch_select_indices(repeat)
        return _Batch(rows, cache, mask[repeat], logits[repeat])

    def _sample(self, batch: _Batch) -> tuple[torch.Tensor, list[Sample]]:
        """The next token [B] of every row, and the rows that it finished."""
        seeds = np.array([row.request.seed + row.index for row in batch.rows], dtype=np.uint64)
        uniforms = trace_uniforms(seeds, batch.position)
        tokens, logprobs = sample_tokens(batch.logits, self.temperature, uniforms)
        batch.position += 1
        samples = []
        for row, token, logprob in zip(batch.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if row.finish is not None:
                continue
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.finish = self._finish(row)
            if row.finish is not None:
                samples.append(
                    Sample(row.request.key, row.index, row.token_ids, row.logprobs, row.finish, row.cached_tokens)
                )
        return tokens, samples

    def _forward_tokens(self, batch: _Batch, tokens: torch.Tensor, running: list[int]) -> None:
        """Feed `tokens` [B] to the model; finished rows leave the batch as it halves."""
        if len(running) <= len(batch.rows) // 2:
            keep = torch.tensor(running, device=self.device)
            batch.cache.batch_select_indices(keep)
            batch.mask, tokens = batch.mask[keep], tokens[keep]
            batch.rows = [batch.rows[slot] for slot in running]
        # What a finished row is fed counts as padding, so its position stays within the model's.
        real = torch.tensor([[row.finish is None] for row in batch.rows], dtype=batch.mask.dtype, device=self.device)
        batch.mask = torch.cat([batch.mask, real], dim=1)
        batch.logits = self._forward(tokens[:, None], batch.mask, batch.cache)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Logits [B, V] of the last column of ids [B, W], given the mask [B, cached + W] of real tokens."""
        positions = (mask.cumsum(1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        output = self.model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1]

    def _finish(self, row: _Row) -> FinishReason | None:
        if row.token_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if len(row.token_ids) >= row.request.max_tokens else None


def _check_cache(model: PreTrainedModel) -> None:
    for layer in DynamicCache(config=model.config).layers:
        if not isinstance(layer, DynamicLayer) or isinstance(layer, LinearAttentionCacheLayerMixin):
            raise UserError(
                f"{type(model).__name__} keeps a {type(layer).__name__}, which the embedded engine cannot left-pad and "
                "repeat: use a model with attention layers only, or another rollout.engine.name"
            )


def empty_model(config: Config, runtime: Runtime) -> PreTrainedModel:
    """The model of `config` on this rank's device, with weights yet to come."""
    hf_config = AutoConfig.from_pretrained(config.model.path)
    # Training may move a tied head apart from the embedding (LoRA on the unembedding), so the engine's is its own.
    hf_config.tie_word_embeddings = False
    with torch.device(runtime.device):
        return AutoModelForCausalLM.from_config(
            hf_config, dtype=getattr(torch, config.policy.param_dtype), attn_implementation="sdpa"
        )
