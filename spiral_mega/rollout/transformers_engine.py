"""The embedded engine: batched sampling with a KV cache on a plain transformers model.

It needs no extra packages. It decodes one batch to its end, one token a step, before it starts the
next one. For throughput on GPUs use an engine with continuous batching.

    queue --_prefill--> batch --_sample--> a token for each row --_forward_tokens--> batch --> ...

    _prefill         runs each distinct prompt once, and repeats its cache for all rows that share it
    _sample          returns the rows that finish
    _forward_tokens  drops finished rows once they are half of the batch
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from spiral_mega.config import Config
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.models.tensor_names import to_checkpoint_names
from spiral_mega.models.weights import checked_weights
from spiral_mega.rollout.engine import Replica, Request, RequestKey, Sample
from spiral_mega.rollout.kv_cache import ATTENTION, growing_cache
from spiral_mega.rollout.sampling import sample_tokens, trace_uniforms
from spiral_mega.traces import FinishReason


@dataclass(slots=True)
class _Row:
    """One sample of a request: the tokens so far, and their log-probs."""

    request: Request
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0

    def sample(self) -> Sample:
        assert self.finish is not None
        return Sample(
            key=self.request.key,
            index=self.index,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish=self.finish,
            cached_tokens=self.cached_tokens,
        )


@dataclass(slots=True)
class _Batch:
    """Rows [B] that decode together, all at the same response `position`, some of them finished.

    `mask` [B, cached] is 1 for real tokens and 0 for padding; `logits` [B, V] predict the next
    token.
    """

    rows: list[_Row]
    cache: DynamicCache
    mask: torch.Tensor
    logits: torch.Tensor
    position: int = 0

    def running(self) -> list[int]:
        """Return the positions of the unfinished rows."""
        return [slot for slot, row in enumerate(self.rows) if row.finish is None]

    def select(self, slots: list[int]) -> None:
        """Keep these rows only, in mask and cache; the caller replaces `logits`."""
        indices = torch.tensor(slots, device=self.mask.device)
        self.cache.batch_select_indices(indices)
        self.mask = self.mask[indices]
        self.rows = [self.rows[slot] for slot in slots]


class TransformersEngine:
    """A `RolloutEngine` that samples from `model` [vocabulary V] on the model's device.

    `stop_ids` end a response and are part of it, even one that is also the padding token. Raises
    UserError for a model whose cache holds more than keys and values (state-space and linear
    attention layers).
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
        self._partly_loaded = False
        _check_cache(model)
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(ATTENTION)

    def add(self, request: Request) -> None:
        if not request.prompt_ids or request.max_tokens < 1 or request.num_samples < 1:
            raise ValueError(
                f"request {request.key!r} needs a prompt, max_tokens >= 1 and num_samples >= 1"
            )
        self._queue += [_Row(request, index) for index in range(request.num_samples)]

    def abort(self, keys: Collection[RequestKey]) -> None:
        self._queue = [row for row in self._queue if row.request.key not in keys]
        if self._batch is None:
            return
        for row in self._batch.rows:
            if row.request.key in keys and row.finish is None:
                row.finish = "length"  # leaves the batch without being returned
        if not self._batch.running():
            self._batch = None

    def has_unfinished(self) -> bool:
        return bool(self._queue) or self._batch is not None

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """Decode one token of every row of the batch."""
        if self._partly_loaded:
            raise RuntimeError(
                "the last load_weights failed part-way: load all weights before sampling"
            )
        if self._batch is None:
            if not self._queue:
                return []
            self._batch = self._next_batch()
        batch = self._batch
        tokens, samples = self._sample(batch)
        if batch.running():
            self._forward_tokens(batch, tokens)
        else:
            self._batch = None
        return samples

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        named_parameters = self.model.named_parameters(remove_duplicate=False)
        parameters = ((name, parameter.detach()) for name, parameter in named_parameters)
        targets = dict(to_checkpoint_names(self.model.config.model_type, parameters))
        shapes = {name: target.shape for name, target in targets.items()}
        self._partly_loaded = True
        with torch.no_grad():
            for name, tensor in checked_weights(weights, shapes):
                targets[name].copy_(tensor)
        self._partly_loaded = False

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise NotImplementedError(
            "the embedded engine takes merged weights: set rollout.sync.lora=merge"
        )

    def reset_prefix_cache(self) -> None:
        pass  # no cache outlives its batch

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        self._queue.clear()
        self._batch = None

    def _next_batch(self) -> _Batch:
        """Take the rows of lowest `priority` from the queue, and prefill them."""
        self._queue.sort(key=lambda row: row.request.priority)  # stable: equals keep their order
        rows = self._queue[: self.max_num_seqs]
        batch = self._prefill(rows)
        del self._queue[: self.max_num_seqs]
        return batch

    def _prefill(self, rows: list[_Row]) -> _Batch:
        """Run each distinct prompt once, left-padded; repeat its cache for all of its rows."""
        for before, row in pairwise(rows):
            row.cached_tokens = len(row.request.prompt_ids) if row.request is before.request else 0
        requests = list({id(row.request): row.request for row in rows}.values())
        ids, mask = _left_padded([request.prompt_ids for request in requests], self.device)
        cache = growing_cache(self.model.config)
        logits = self._forward(ids, mask, cache)
        slots = {id(request): slot for slot, request in enumerate(requests)}
        repeat = torch.tensor([slots[id(row.request)] for row in rows], device=self.device)
        cache.batch_select_indices(repeat)
        return _Batch(rows, cache, mask[repeat], logits[repeat])

    def _sample(self, batch: _Batch) -> tuple[torch.Tensor, list[Sample]]:
        """Sample the next token of every row; return the tokens [B] and the finished samples."""
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
            row.finish = self._finish_reason(row)
            if row.finish is not None:
                samples.append(row.sample())
        return tokens, samples

    def _finish_reason(self, row: _Row) -> FinishReason | None:
        if row.token_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if len(row.token_ids) >= row.request.max_tokens else None

    def _forward_tokens(self, batch: _Batch, tokens: torch.Tensor) -> None:
        """Feed `tokens` [B] to the model; drop finished rows once they are half of the batch."""
        running = batch.running()
        if len(running) <= len(batch.rows) // 2:
            batch.select(running)
            tokens = tokens[torch.tensor(running, device=self.device)]
        # A finished row's tokens count as padding, so that its position stays within the model's
        # maximum.
        is_real = [[row.finish is None] for row in batch.rows]
        new_column = torch.tensor(is_real, dtype=batch.mask.dtype, device=self.device)
        batch.mask = torch.cat([batch.mask, new_column], dim=1)
        batch.logits = self._forward(tokens[:, None], batch.mask, batch.cache)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return logits [B, V] at the last column of ids [B, W].

        `mask` [B, cached + W] is 1 for real tokens.
        """
        positions = (mask.cumsum(1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        output = self.model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


def _left_padded(
    prompts: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [B, longest prompt], padded on the left with 0, and the mask of real tokens."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _check_cache(model: PreTrainedModel) -> None:
    for layer in DynamicCache(config=model.config).layers:
        if not isinstance(layer, DynamicLayer) or isinstance(layer, LinearAttentionCacheLayerMixin):
            raise UserError(
                f"{type(model).__name__} keeps a {type(layer).__name__}, which the embedded engine "
                "cannot left-pad and repeat: use a model with attention layers only, or another "
                "rollout.engine.name"
            )


def empty_model(config: Config, runtime: Runtime) -> PreTrainedModel:
    """Return the model of `config` on this rank's device, with weights yet to be loaded."""
    hf_config = AutoConfig.from_pretrained(config.model.path)
    # Training may move a tied head away from the embedding (LoRA on the unembedding), so the engine
    # unties them.
    hf_config.tie_word_embeddings = False
    with torch.device(runtime.device):
        return AutoModelForCausalLM.from_config(
            hf_config, dtype=getattr(torch, config.policy.param_dtype), attn_implementation="sdpa"
        )
