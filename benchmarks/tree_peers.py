"""CPU-seconds of one update on SPIRAL's aggregation traces: ours, TRL's GRPOTrainer, and TRL's TreeRow; one thread.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0 psutil
    python -m benchmarks.tree_peers --trl-python /tmp/trl/bin/python

8 problems with 4 prompts of 700 tokens (a problem, and 4 of 8 traces in ascending order), 4 responses of 128 tokens to
each; a Qwen3 of 3.2 M parameters in float32, clipped importance sampling, one step of AdamW, entropies measured.
Counted is everything from sequences with rewards to new weights, in a process of its own that has updated once on short
sequences before; contenders run in turns.

- `ours`: FsdpPolicy on micro-batches of at most 16,384 distinct tokens, as the trainer drives it.
- `GRPOTrainer`: the trainer with a `rollout_func` that returns these sequences, micro-batches of 16.
- `scored`: the same, with the head of a GPU (below).
- `TreeRow`: the packing of TRL's experimental AsyncGRPOTrainer (which needs a vLLM server, and flash-attn 3) with its
  loss written out here, at most 16,384 distinct tokens a row, and torch's attention for the kernel, a call a segment.

On a CPU, TRL's head computes every position. For `scored` and for TreeRow it is made to take the scored ones only, as
it does on a GPU. GRPOTrainer takes its own log-probs for the sampler's, so that its loss is that of ratio 1.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

VOCABULARY, PROBLEM, TRACE, RESPONSE = 3200, 60, 160, 128
BUDGET, CLIP, SAMPLER_LOGPROB = 16_384, 0.2, -8.0
CONTENDERS = ("ours", "GRPOTrainer", "scored", "TreeRow")


class Item(NamedTuple):
    """A prompt, a response to it, and its advantage."""

    problem: int
    prompt: list[int]
    response: list[int]
    advantage: float


def batch(problems: int, response: int = RESPONSE) -> list[Item]:
    """Four prompts a problem, four responses a prompt, every other one right."""
    items = []
    for problem in range(problems):
        rng = random.Random(problem)
        text = lambda length: [rng.randrange(10, VOCABULARY) for _ in range(length)]  # noqa: B023, E731
        start, traces = text(PROBLEM), [text(TRACE) for _ in range(8)]
        for _ in range(4):
            shown = [token for i in sorted(rng.sample(range(8), 4)) for token in traces[i]]
            items += [Item(problem, [*start, *shown], text(response), 0.5 - i % 2) for i in range(4)]
    return items


def main(trl_python: str, problems: int, turns: int) -> None:
    from benchmarks.step_vs_trl import save_model  # not in TRL's environment, which runs this file by its path

    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, VOCABULARY)
        for turn in range(turns):
            for name in sorted(found, reverse=bool(turn % 2)):
                python = sys.executable if name == "ours" else trl_python
                found[name].append(_child(python, name, folder, problems))
                each = found[name][-1]
                print(
                    f"{name:12} {each['cpu']:6.2f} CPU-s, loss {each['loss']:.6f}, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    medians = {name: median(each["cpu"] for each in runs) for name, runs in found.items()}
    ratios = ", ".join(f"{name} {value:.2f} ({value / medians['ours']:.2f} x)" for name, value in medians.items())
    print(f"medians of {turns}, CPU-s: {ratios}; {os.cpu_count()} cores")


def _child(python: str, name: str, folder: str, problems: int) -> dict[str, float]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.getcwd()
    command = [python, str(Path(__file__)), "--child", name, folder, str(problems)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {name} failed:\n{done.stderr[-3000:]}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def ours(folder: str, problems: int) -> dict[str, float]:
    from spiral_mega.config import Config
    from spiral_mega.packing.balance import distribute
    from spiral_mega.packing.sequences import Sequence
    from spiral_mega.policy import build_policy
    from spiral_mega.runtime import start_runtime

    config = Config.model_validate(
        {
            "run": {"dir": f"{folder}/run", "steps": 2},
            "model": {"path": folder},
            "data": {"train": [{"path": "unused.jsonl"}]},
            "rollout": {"max_response_tokens": RESPONSE, "max_context_tokens": 1024},
            "algorithm": {"loss": "ppo_clip", "clip_low": CLIP, "clip_high": CLIP},
            "policy": {"microbatch_tokens": BUDGET},
        }
    )

    def sequences(items: list[Item]) -> list[Sequence]:
        tokens = sum(len(item.response) for item in items)
        return [
            Sequence((item.problem, i), item.prompt, item.response, [SAMPLER_LOGPROB] * len(item.response),
                     item.advantage, 1 / tokens)
            for i, item in enumerate(items)
        ]  # fmt: skip

    with start_runtime() as runtime:
        policy = build_policy(config, runtime)
        policy.update(distribute(sequences(batch(1, response=2)), BUDGET, policy.replica))
        learnt = sequences(batch(problems))
        start = time.process_time()
        metrics = policy.update(distribute(learnt, BUDGET, policy.replica))
        return {"cpu": time.process_time() - start, "loss": metrics["train/loss"]}


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
        learning_rate=2e-5,
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
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if entry.get("step") == 2 and "loss" in entry]
    return {"cpu": spent[1], "loss": loss}


def tree_row(folder: str, problems: int) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo import packing
    from trl.trainer.utils import add_fused_lm_head

    _head_takes_scored_positions()
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_torch_varlen)
    packing.register_tree_attention()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=packing.TREE_ATTENTION)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

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
            loss = -torch.min(ratio * packed["advantages"], clipped * packed["advantages"]).sum() / tokens
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
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: float, causal: bool, window_size: Any
) -> Any:
    """q [Tq, Hq, D], k, v [Tk, Hkv, D], causal from the last key back: torch's kernel for each segment."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    parts = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        square = q1 - q0 == k1 - k0
        seen = None if square else torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
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
    utils._use_triton = lambda device: sys._getframe(1).f_code.co_name == "_fused_forward" or on_triton(device)


if __name__ == "__main__":
    import argparse

    if sys.argv[1:2] == ["--child"]:
        runs = {"ours": ours, "GRPOTrainer": grpo_trainer, "scored": grpo_trainer_scored, "TreeRow": tree_row}
        run = runs[sys.argv[2]]
        print(json.dumps(run(sys.argv[3], int(sys.argv[4]))))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--trl-python", required=True, help="python of an environment with TRL 1.16")
        parser.add_argument("--problems", type=int, default=8)
        parser.add_argument("--turns", type=int, default=3)
        given = parser.parse_args()
        main(given.trl_python, given.problems, given.turns)
