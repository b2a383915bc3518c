"""Compare the CPU time of a GRPO step with TRL's: 8 prompts x 12 samples x 128 forced tokens, one thread.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0
    python -m benchmarks.step_vs_trl --trl-python /tmp/trl/bin/python

Uses a random Qwen3 of 2.9 M parameters in float32. Both sample, reward each response by the parity of its words, and
make one update with AdamW. They alternate, each in its own process. TRL trains on the step's 96 responses at once,
its default, and on 12 at a time, which fits the caches better; ours trains on parts of a tree that fit them.
Counts the CPU time of the process and its children over whole steps after the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil

PROMPTS, SAMPLES, TOKENS, PROMPT_TOKENS = 8, 12, 128, 32
VOCABULARY = 2048
TOKENIZER = "configs/demo/model"
OURS, WHOLE, PARTS = "ours", "TRL, 96 at a time", "TRL, 12 at a time"


def main(trl_python: str, turns: int, steps: int) -> None:
    found: dict[str, list[float]] = {OURS: [], WHOLE: [], PARTS: []}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.step_vs_trl", "--model", folder], check=True
        )
        for turn in range(turns):
            for name in sorted(found, reverse=bool(turn % 2)):
                python = sys.executable if name == OURS else trl_python
                found[name].append(_child(python, name, folder, steps))
                print(f"{name}: {found[name][-1]:.2f} CPU-s a step", flush=True)
    medians = {name: median(each) for name, each in found.items()}
    print(f"medians of {turns} on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}:")
    for name, seconds in medians.items():
        print(f"  {name}: {seconds:.2f} CPU-s a step, {seconds / medians[OURS]:.2f} of ours")


def _child(python: str, name: str, folder: str, steps: int) -> float:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, str(Path(__file__)), "--child", name, folder, str(steps)]
    environment["PYTHONPATH"] = os.getcwd()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {name} failed:\n{done.stderr[-3000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["cpu"])


def save_model(folder: str, vocabulary: int = VOCABULARY) -> None:
    """Save a small random Qwen3 and the demo's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    shape |= {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model = Qwen3ForCausalLM(
        Qwen3Config(**shape, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    )
    print(f"{model.num_parameters() / 1e6:.1f} M parameters")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def questions() -> list[str]:
    """Return distinct prompts made of the demo's words."""
    return [" ".join(str((7 * i + j) % 64) for j in range(PROMPT_TOKENS)) for i in range(PROMPTS)]


def parity(response: str, answers: tuple[str, ...]) -> float:
    """Reward about half of all responses."""
    return float(len(response.split()) % 2)


@contextmanager
def cpu_time(spent: list[float]) -> Iterator[None]:
    """Append the CPU-seconds of this process and its children to `spent`."""
    process = psutil.Process()

    def total() -> float:
        family = [process, *process.children(recursive=True)]
        return sum(sum(each.cpu_times()[:2]) for each in family)

    before = total()
    yield
    spent.append(total() - before)


def ours(folder: str, steps: int) -> float:
    from spiral_mega.config import Config
    from spiral_mega.distributed.runtime import start_runtime
    from spiral_mega.run import open_run
    from spiral_mega.train import train_step

    data = Path(folder) / "problems.jsonl"
    data.write_text(
        "".join(json.dumps({"problem": each, "answer": "1"}) + "\n" for each in questions())
    )
    config = Config.model_validate(
        {
            "run": {"dir": f"{folder}/run", "steps": steps + 1},
            "model": {"path": folder},
            "data": {
                "train": [{"path": str(data), "verifier": "benchmarks.step_vs_trl:parity"}],
                "max_prompt_tokens": 64,
            },
            "prompts": {"instruction": ""},
            "rollout": {
                "sampling": {"max_response_tokens": TOKENS, "max_context_tokens": 256},
                "engine": {"max_num_seqs": 96},
            },
            "algorithm": {"objective": "grpo", "search_traces": SAMPLES},
            "policy": {"microbatch_tokens": 1600},
            "optimizer": {"lr": 1e-5},
            "batch": {"problems": PROMPTS, "dynamic_sampling": False},
            "rewards": {"workers": 1},
        }
    )
    spent: list[float] = []
    with start_runtime() as runtime, open_run(config, runtime) as run:
        run.sync()
        run.collector.pipeline.engine.stop_ids = frozenset()  # type: ignore[attr-defined]  # as long as allowed
        for step in range(steps + 1):
            with cpu_time(spent):
                metrics = train_step(run, step)
            assert metrics["length/search"] == TOKENS
    return sum(spent[1:]) / steps


def trl(folder: str, steps: int, at_a_time: int) -> float:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    spent: list[float] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.timing = cpu_time(spent)
            self.timing.__enter__()

        def on_step_end(self, *_: object, **__: object) -> None:
            self.timing.__exit__(None, None, None)

    arguments = GRPOConfig(
        output_dir=f"{folder}/trl",
        max_steps=steps + 1,
        per_device_train_batch_size=at_a_time,
        gradient_accumulation_steps=PROMPTS * SAMPLES // at_a_time,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        generation_kwargs={"min_new_tokens": TOKENS},
        learning_rate=1e-5,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )
    prompts = [{"prompt": [{"role": "user", "content": each}]} for each in questions()]
    trainer = GRPOTrainer(
        model=folder,
        args=arguments,
        reward_funcs=lambda completions, **_: [
            parity(each[0]["content"], ()) for each in completions
        ],
        train_dataset=Dataset.from_list(prompts),
        callbacks=[Timer()],
    )
    trainer.train()
    return sum(spent[1:]) / steps


if __name__ == "__main__":
    if sys.argv[1:2] == ["--model"]:
        save_model(sys.argv[2])
    elif sys.argv[1:2] == ["--child"]:
        name, folder, steps = sys.argv[2], sys.argv[3], int(sys.argv[4])
        at_a_time = {WHOLE: PROMPTS * SAMPLES, PARTS: 12}
        print(
            json.dumps(
                {
                    "cpu": ours(folder, steps)
                    if name == OURS
                    else trl(folder, steps, at_a_time[name])
                }
            )
        )
    elif sys.argv[1:2] == ["--trl-python"]:
        main(sys.argv[2], turns=5, steps=2)
    else:
        sys.exit(__doc__)
