"""The models, configurations and sequences of the multi-rank tests, and how they reach the ranks."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from spiral_mega.packing.training_sequence import TrainingSequence
from tests.policy.reference import gradients_of, load_model, make_adapters, make_sequences
from tests.support.ranks import run_ranks
from tests.support.tiny_models import save_tiny_model

ATTENTION_AND_MLP = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"rank": 4, "alpha": 6, "targets": [*ATTENTION_AND_MLP, "lm_head"]}
CHECKPOINTED = {"activation_checkpointing": True}
NO_CLIPPING = {"max_grad_norm": float("inf")}
OPTIMIZER = {
    "lr": 2e-3,
    "weight_decay": 0.1,
    "eps": 1e-4,
    "max_grad_norm": 0.5,
    "warmup_steps": 1,
    "schedule": "cosine",
}
STEPS = 4
# Warm-up of one update, then half a cosine over three: (1 + cos 0) / 2, (1 + cos pi/3) / 2, (1 + cos 2 pi/3) / 2
LR_FACTORS = (0.5, 1.0, 0.75, 0.25)


@dataclass(frozen=True, eq=False)
class GradientCase:
    """What is trained, and at which temperature log-probs are taken."""

    model: str
    lora: dict[str, Any] | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0

    def sections(self) -> dict[str, dict[str, Any]]:
        return {
            "model": {"lora": self.lora},
            "policy": self.policy,
            "optimizer": NO_CLIPPING,
            "rollout": {"sampling.temperature": self.temperature},
        }


GRADIENTS = {
    "tied head": GradientCase("qwen3-tied"),
    "untied head": GradientCase("llama-untied"),
    "activation checkpointing": GradientCase("qwen3-tied", policy=CHECKPOINTED),
    "temperature 0.7": GradientCase("llama-untied", temperature=0.7),
    "LoRA, tied head adapted": GradientCase("qwen3-tied", lora=LORA),
    "LoRA, untied, checkpointing": GradientCase("llama-untied", lora=LORA, policy=CHECKPOINTED),
    "LoRA on two layers only": GradientCase(
        "llama-tied", lora=LORA | {"targets": ["q_proj", "down_proj"]}
    ),
}
LOGPROBS = ("temperature 0.7", "LoRA, tied head adapted")
BF16 = GradientCase("qwen3-tied", policy={"param_dtype": "bfloat16"})
UPDATES = {
    "tied": ("qwen3-tied", None),
    "untied": ("llama-untied", None),
    "LoRA, tied": ("qwen3-tied", LORA),
    "LoRA, untied": ("llama-untied", LORA),
}
SPLITS = {"one budget for all": (4096, 0), "many micro-batches": (30, 1), "other owners": (60, 2)}


@dataclass(eq=False)
class Lab:
    """Models and sequences in `folder`, and what the ranks made of them: `results[world_size][rank][case]`."""

    folder: Path
    results: dict[int, list[dict[str, Any]]] = field(default_factory=dict, repr=False)

    def model(self, name: str) -> Path:
        """The model of that name, such as "qwen3-tied"."""
        path = self.folder / name
        if not path.exists():
            family, head = name.split("-")
            save_tiny_model(path, family, tied=head == "tied")  # type: ignore[arg-type]
        return path

    def plain(self, case: GradientCase) -> torch.nn.Module:
        """The unsharded model of `case`."""
        return load_model(self.model(case.model), case.lora, self.adapters(case))

    @cache  # noqa: B019 (one lab a session)
    def sequences(self, case: GradientCase) -> list[TrainingSequence]:
        """Ragged sequences whose gradient has 0.25 as its largest entry, so that 1e-6 means the same in every case."""
        raw = make_sequences(self.model(case.model), 13, seed=1)
        _, gradients = gradients_of(self.plain(case), raw, case.temperature)
        scale = 0.25 / max(float(g.abs().max()) for g in gradients.values())
        return [replace(sequence, weight=scale * sequence.weight) for sequence in raw]

    def with_holes(self, case: GradientCase) -> list[TrainingSequence]:
        """Sequences some of whose tokens lack the sampler's log-prob; one lacks them all."""
        holed = []
        for i, sequence in enumerate(self.sequences(case)[:6]):
            missing = range(sequence.num_tokens) if i == 4 else range(0, sequence.num_tokens, 3)
            values = [
                float("nan") if j in missing else p for j, p in enumerate(sequence.sampler_logprobs)
            ]
            holed.append(replace(sequence, sampler_logprobs=values))
        return holed

    @cache  # noqa: B019
    def batches(self, model: str) -> list[list[TrainingSequence]]:
        return [make_sequences(self.model(model), 9, seed=10 + i) for i in range(3)]

    def poisoned(self, model: str) -> list[list[TrainingSequence]]:
        """Three batches; one sequence of the second has no finite gradient."""
        first, (spoilt, *others), last = self.batches(model)
        return [first, [*others, replace(spoilt, advantage=float("inf"))], last]

    def adapters(self, case: GradientCase) -> dict[str, torch.Tensor] | None:
        return make_adapters(self.model(case.model), case.lora, seed=3) if case.lora else None

    def broken_model(self) -> Path:
        """A model whose config is whole and whose weights are not: only the rank that reads them can notice."""
        path = self.folder / "broken"
        if not path.exists():
            save_tiny_model(path)
            whole = (path / "model.safetensors").read_bytes()
            (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        return path

    def run(self, world_size: int) -> None:
        """Launch that many ranks on every case that concerns them."""
        cases: dict[str, tuple[str, dict[str, Any]]] = {}
        for name, case in (GRADIENTS | {"bf16": BF16}).items():
            splits = {split: (self.sequences(case), *how) for split, how in SPLITS.items()}
            splits |= {
                "fewer than ranks": (self.sequences(case)[:1], 64, 0),
                "holes": (self.with_holes(case), 40, 3),
            }
            arguments = {
                "model": self.model(case.model),
                "sections": case.sections(),
                "splits": splits,
                "adapters": self.adapters(case),
            }
            cases[f"gradients: {name}"] = "gradients", arguments
            if name in LOGPROBS:
                sections = case.sections() | {"policy": case.policy | {"microbatch_tokens": 40}}
                common = {
                    "model": self.model(case.model),
                    "sections": sections,
                    "adapters": self.adapters(case),
                }
                cases[f"logprobs: {name}"] = (
                    "logprobs",
                    common | {"sequences": self.sequences(case)},
                )
        for name, (model, lora) in UPDATES.items():
            common = {"model": self.model(model), "sections": training_sections(lora)}
            batches = self.batches(model)
            export = self.folder / "exports" / f"{name} {world_size}"
            if world_size <= 2:
                cases[f"updates: {name}"] = (
                    "updates",
                    common | {"batches": batches, "export": export},
                )
                cases[f"poisoned: {name}"] = "updates", common | {"batches": self.poisoned(model)}
            saved = {"batches": batches, "folder": self.folder / "checkpoints" / name}
            if world_size == 2:
                cases[f"interrupted: {name}"] = "interrupted", common | saved
            else:
                rest = {"step": 1, "batches": batches[1:]}
                cases[f"resumed: {name}"] = "resumed", common | saved | rest
        if world_size == 2:
            for name, path in {
                "broken": self.broken_model(),
                "absent": self.folder / "absent",
            }.items():
                cases[f"error: {name}"] = "build_error", {"model": path, "sections": {}}
        self.results[world_size] = run_ranks(world_size, "tests.policy.workers:run_cases", cases)


def training_sections(lora: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {"run": {"steps": STEPS}, "model": {"lora": lora}, "optimizer": OPTIMIZER}
