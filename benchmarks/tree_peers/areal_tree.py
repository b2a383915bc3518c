"""AReaL 1.0.4's tree training: its packing and its log-probs and entropies of a packed tree, with its loop and a loss
written out here (the engine needs a GPU), without its statistics of logits.

Its attention is FlexAttention, whose backward pass does not run on a CPU: torch's kernel with AReaL's own dense mask is
put in. Trees are padded to their budget, so that it is set to the least that holds one problem.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from areal.models.tree_attn.constants import BLOCK_SIZE
from areal.models.tree_attn.functional import gather_packed_tree_logprobs_entropy
from areal.models.tree_attn.tree import build_attention_mask_from_trie, build_packed_tree_batch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AutoModelForCausalLM

from .batch import CLIP, LEARNING_RATE, SAMPLER_LOGPROB, Item, batch


def update(folder: str, problems: int) -> dict[str, float]:
    AttentionInterface.register("dense_tree", _attend)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dense_tree")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    _step(model, optimizer, batch(1, response=2), _budget([batch(1, response=2)]))
    items = batch(problems)
    budget = _budget(
        [[item for item in items if item.problem == problem] for problem in range(problems)]
    )
    start = time.process_time()
    loss = _step(model, optimizer, items, budget)
    return {"cpu": time.process_time() - start, "loss": loss}


def _budget(groups: list[list[Item]]) -> int:
    """Tokens of the largest problem's tree, in whole blocks."""
    largest = max(
        len({(*item.prompt, *item.response)[: end + 1] for item in group
             for end in range(len(item.prompt) + len(item.response))})
        for group in groups
    )  # fmt: skip
    return -(-largest // BLOCK_SIZE) * BLOCK_SIZE


def _step(model: Any, optimizer: torch.optim.Optimizer, items: list[Item], budget: int) -> float:
    """One update on trees of `budget` tokens; the loss."""
    total, tokens = 0.0, sum(len(item.response) for item in items)
    padded = lambda rows: pad_sequence([torch.tensor(row) for row in rows], batch_first=True)  # noqa: E731
    data = {
        "input_ids": padded([[*item.prompt, *item.response] for item in items]),
        "attention_mask": padded([[1] * (len(item.prompt) + len(item.response)) for item in items]),
        # Of the token that follows, where log-probs are.
        "scored": padded(
            [[0.0] * (len(item.prompt) - 1) + [1.0] * len(item.response) + [0.0] for item in items]
        ),
        "advantages": padded(
            [[item.advantage] * (len(item.prompt) + len(item.response)) for item in items]
        ),
    }
    spec = SimpleNamespace(n_mbs=1, granularity=1, n_mbs_divisor=1, max_tokens_per_mb=budget)
    for packed in build_packed_tree_batch(data, spec).mbs:
        trie, ids = packed["trie_node"], packed["input_ids"].view(1, -1)
        mask = build_attention_mask_from_trie(trie, ids.shape[1], ids.device)
        logits = model(input_ids=ids, position_ids=packed["position_ids"], tree_mask=mask).logits[0]
        logprobs, entropies = gather_packed_tree_logprobs_entropy(logits, trie, ids)
        ratio, advantages = (logprobs - SAMPLER_LOGPROB).exp(), packed["advantages"]
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = (
            -(torch.min(ratio * advantages, clipped * advantages) * packed["scored"]).sum() / tokens
        )
        torch.autograd.backward(loss)
        total += loss.item()
        (entropies * packed["scored"]).sum().item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def _attend(
    module: Any,
    q: Any,
    k: Any,
    v: Any,
    attention_mask: Any,
    *,
    scaling: float,
    tree_mask: Any,
    **_: Any,
) -> Any:
    """q [1, Hq, T, D], k, v [1, Hkv, T, D] under a mask [T, T]; -> [1, T, Hq, D], no weights. Padding sees itself."""
    seen = tree_mask | torch.eye(len(tree_mask), dtype=torch.bool)
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None
