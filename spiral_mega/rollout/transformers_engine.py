"""The embedded engine: batched sampling with a KV cache on a plain transformers model. No server, no extra package.

It decodes one batch at a time to its end. For throughput on GPUs use an engine with continuous batching.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from spiral_mega.rollout.engine import Request, Sample
from spiral_mega.rollout.sampling import sample_tokens, trace_uniforms
from spiral_mega.traces import FinishReason


@dataclass(slots=True)
class _Row:
    request: Request
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TransformersEngine:
    """Samples from `model` [vocabulary V] on its own device.

    `stop_ids` end a response and are kept in it, also where the padding token is the same.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float, stop_ids: Iterable[int], max_batch: int) -> None:
        self.model = model.eval().requires_grad_(False)
        self.device = next(model.parameters()).device
        self.temperature = temperature
        self.stop_ids = frozenset(stop_ids)
        self.max_batch = max_batch
        self._queue: deque[_Row] = deque()

    def add(self, request: Request) -> None:
        if not request.prompt_ids or request.max_tokens < 1 or request.num_samples < 1:
            raise ValueError(f"request {request.key!r} needs a prompt, max_tokens >= 1 and num_samples >= 1")
        self._queue.extend(_Row(request, index) for index in range(request.num_samples))

    def has_unfinished(self) -> bool:
        return bool(self._queue)

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        rows = [self._queue.popleft() for _ in range(min(self.max_batch, len(self._queue)))]
        return self._decode(rows) if rows else []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        targets = dict(self.model.named_parameters(remove_duplicate=False))
        missing = set(targets)
        with torch.no_grad():
            for name, tensor in weights:
                if name not in targets or targets[name].shape != tensor.shape:
                    expected = tuple(targets[name].shape) if name in targets else "no such tensor"
                    raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}; the engine has {expected}")
                targets[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise ValueError(f"weights were not sent: {', '.join(sorted(missing))}")

    def _decode(self, rows: list[_Row]) -> list[Sample]:
        """Decode `rows` together until each has stopped; rows that end leave the batch as it halves."""
        cache, mask, logits = self._prefill(rows)
        seeds = np.array([row.request.seed + row.index for row in rows], dtype=np.uint64)
        alive = list(range(len(rows)))
        for position in range(max(row.request.max_tokens for row in rows)):
            tokens, logprobs = sample_tokens(logits, self.temperature, trace_uniforms(seeds[alive], position))
            running = []
            for slot, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
                row = rows[alive[slot]]
                if self._finished(row):
                    continue
                row.token_ids.append(token)
                row.logprobs.append(logprob)
                if not self._finished(row):
                    running.append(slot)
            if not running:
                break
            if len(running) <= len(alive) // 2:
                keep = torch.tensor(running, device=self.device)
                cache.batch_select_indices(keep)
                mask, tokens = mask[keep], tokens[keep]
                alive = [alive[slot] for slot in running]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            logits = self._forward(tokens[:, None], mask, cache)
        return [self._sample(row) for row in rows]

    def _prefill(self, rows: list[_Row]) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
        """Run each distinct prompt once (left-padded) and repeat its cache for every row that shares it."""
        requests = list({id(row.request): row.request for row in rows}.values())
        width = max(len(request.prompt_ids) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros(len(requests), width, dtype=torch.long)
        for i, request in enumerate(requests):
            ids[i, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[i, width - len(request.prompt_ids) :] = 1
        cache = DynamicCache(config=self.model.config)
        mask = mask.to(self.device)
        logits = self._forward(ids.to(self.device), mask, cache)
        slots = {id(request): i for i, request in enumerate(requests)}
        repeat = torch.tensor([slots[id(row.request)] for row in rows], device=self.device)
        cache.batch_select_indices(repeat)
        return cache, mask[repeat], logits[repeat]

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Logits [B, V] of the last column of ids [B, W], given the mask [B, cached + W] of real tokens."""
        positions = (mask.cumsum(1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        output = self.model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1]

    def _finished(self, row: _Row) -> bool:
        return bool(row.token_ids) and (
            row.token_ids[-1] in self.stop_ids or len(row.token_ids) >= row.request.max_tokens
        )

    def _sample(self, row: _Row) -> Sample:
        finish: FinishReason = "stop" if row.token_ids[-1] in self.stop_ids else "length"
        return Sample(row.request.key, row.index, row.token_ids, row.logprobs, finish)
