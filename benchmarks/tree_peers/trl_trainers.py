"""TRL 1.16.

- `grpo_trainer`: its trainer with a `rollout_func` that returns these sequences, micro-batches of 16. It takes its own
  log-probs for the sampler's, so that its loss is that of ratio 1.
- `grpo_trainer_scored`: the same, with the head of a GPU: on a CPU, TRL's head computes every position, and here it is
  made to take the scored ones only, as it does on a GPU.
- `tree_row`: the packing of its experimental AsyncGRPOTrainer (which needs a vLLM server, and flash-attn 3) with its
  loss written out here, at most 16,384 distinct tokens a row, that head, and torch's attention for the kernel, a call a
  segment.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .batch import BUDGET, CLIP, LEARNING_RATE, RESPONSE, SAMPLER_LOGPROB, Item, batch


def grpo_trainer_scored(folder: str, problems: int) -> dict[str, float]:
    _head_takes_scored_positions()
    return grpo_trainer(folder, problems)


def grpo_trainer(folder: str, problems: int) -> dict[str, float]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    spent: list[float] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            spent.append(-time.process_time())

        def on_step_end(self, *_: object, **__: object) -> None:
            spent[-1] += time.process_time()

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        items = batch(problems, response=RESPONSE if spent[1:] else 2)
        return {
            "prompt_ids": [item.prompt for item in items] if spent[1:] else [[10]] * len(items),
            "completion_ids": [item.response for item in items],
            "logprobs": [[SAMPLER_LOGPROB] * len(item.response) for item in items],
        }

    size = len(batch(problems))
    arguments = GRPOConfig(
        output_dir=f"{folder}/trl",
        max_steps=2,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=size // 16,
        num_generations=4,
        max_completion_length=RESPONSE,
        scale_rewards="none",
        epsilon=CLIP,
        learning_rate=LEARNING_RATE,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )
    trainer = GRPOTrainer(
        model=folder,
        args=arguments,
        reward_funcs=lambda completions, **_: [float(i % 2 == 0) for i in range(len(completions))],
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(size // 4)]),
        rollout_func=rollout,
        callbacks=[Timer()],
    )
    trainer.train()
    (loss,) = [
        entry["loss"]
        for entry in trainer.state.log_history
        if entry.get("step") == 2 and "loss" in entry
    ]
    return {"cpu": spent[1], "loss": loss}


def tree_row(folder: str, problems: int) -> dict[str, float]:
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo import packing
    from trl.trainer.utils import add_fused_lm_head

    _head_takes_scored_positions()
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_torch_varlen)
    packing.register_tree_attention()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=packing.TREE_ATTENTION)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def update(items: list[Item]) -> float:
        total, tokens = 0.0, sum(len(item.response) for item in items)
        rows = [packing.TreeRow()]
        for item in items:
            length, answer = len(item.prompt) + len(item.response), len(item.prompt)
            of_response = torch.arange(length) >= answer
            sample = {
                "input_ids": torch.tensor([*item.prompt, *item.response]),
                "completion_mask": of_response.long(),
                "old_log_probs": torch.where(of_response, SAMPLER_LOGPROB, 0.0),
                "advantage": item.advantage,
                "group_id": item.problem,
            }
            if not rows[-1].fits(sample, BUDGET):
                rows.append(packing.TreeRow())
            rows[-1].add(sample)
        for row in rows:
            packed = row.pack()
            longest_q, longest_k = packed["tree_max_seqlens"].tolist()
            output = model(
                **{key: packed[key][None] for key in ("input_ids", "position_ids", "shift_labels")},
                **{key: packed[key] for key in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")},
                tree_max_seqlen_q=longest_q, tree_max_seqlen_k=longest_k, fused_lm_head=True,
            )  # fmt: skip
            ratio = (output.log_probs[0, packed["token_index"]] - packed["old_log_probs"]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = (
                -torch.min(ratio * packed["advantages"], clipped * packed["advantages"]).sum()
                / tokens
            )
            torch.autograd.backward(loss)
            total += loss.item()
            output.entropy[0, packed["token_index"]].mean().item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    update(batch(1, response=2))
    items = batch(problems)
    start = time.process_time()
    loss = update(items)
    return {"cpu": time.process_time() - start, "loss": loss}


def _torch_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    *_: Any,
    softmax_scale: float,
    causal: bool,
    window_size: Any,
) -> Any:
    """q [Tq, Hq, D], k, v [Tk, Hkv, D], causal from the last key back: torch's kernel for each segment."""
    parts = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        square = q1 - q0 == k1 - k0
        seen = (
            None
            if square
            else torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        )
        inputs = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        part = scaled_dot_product_attention(
            *inputs, attn_mask=seen, is_causal=square, scale=softmax_scale, enable_gqa=True
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


def _head_takes_scored_positions() -> None:
    """On a CPU too; which function computes them stays as it is."""
    from trl.trainer import utils

    on_triton = utils._use_triton
    utils._use_triton = lambda device: (
        sys._getframe(1).f_code.co_name == "_fused_forward" or on_triton(device)
    )
