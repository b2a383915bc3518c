"""The models, layouts and sequences of the Megatron policy's tests, and how they reach the ranks."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from tests.policy.cases import ATTENTION_AND_MLP, OPTIMIZER, STEPS
from tests.policy.cases import LORA as EVERYWHERE
from tests.policy.reference import gradients_of, load_model, make_adapters, make_sequences
from tests.policy.test_reference import TEMPERATURE
from tests.policy.test_reference import Case as KlCase
from tests.support.ranks import run_ranks
from tests.support.tiny_models import save_tiny_model

HEADS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # so that a rank of two still has two groups to sort
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 tied": ("qwen3", {"tied": True}),
    "qwen3": ("qwen3", {"tied": False}),
    "llama": ("llama", {"tied": False, "rope_parameters": LLAMA3}),
    "qwen2 tied": ("qwen2", {"tied": True}),
    "experts": ("qwen3_moe", {"tied": False}),
    "five layers, tied": ("qwen3", {"tied": True, "num_hidden_layers": 5}),
    "three layers, experts": (
        "qwen3_moe",
        {"tied": False, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    "some experts": ("qwen3_moe", {"tied": False, "mlp_only_layers": [0], "norm_topk_prob": False}),
}
# Name: ranks, model, policy.megatron.
GRADIENTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "TP2": (2, "qwen3", {"tensor_parallel": 2, "sequence_parallel": False}),
    "TP2+SP": (2, "qwen3 tied", {"tensor_parallel": 2}),
    "TP2+SP, biases": (2, "qwen2 tied", {"tensor_parallel": 2}),
    "PP2": (2, "llama", {"pipeline_parallel": 2}),
    "PP2, tied": (2, "qwen3 tied", {"pipeline_parallel": 2}),
    "PP2 of three layers": (2, "three layers, experts", {"pipeline_parallel": 2}),
    "PP2 x VP2, tied": (2, "five layers, tied", {"pipeline_parallel": 2, "virtual_stages": 2}),
    "DP2": (2, "qwen3 tied", {}),
    "CP2": (2, "qwen3 tied", {"context_parallel": 2}),
    "CP2 x EP2": (2, "some experts", {"context_parallel": 2, "expert_parallel": 2}),
    "EP2": (2, "experts", {"expert_parallel": 2}),
    "EP2 x TP2": (2, "some experts", {"expert_parallel": 2, "tensor_parallel": 2}),
    "PP2 x TP2+SP, qwen3": (4, "qwen3 tied", {"pipeline_parallel": 2, "tensor_parallel": 2}),
    "PP2 x TP2+SP, llama": (4, "llama", {"pipeline_parallel": 2, "tensor_parallel": 2}),
    "PP2 x TP2+SP, qwen2": (4, "qwen2 tied", {"pipeline_parallel": 2, "tensor_parallel": 2}),
    "PP2 x TP2+SP x EP2": (
        4,
        "experts",
        {"pipeline_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2},
    ),
    "PP2 x VP2 x CP2": (
        4,
        "five layers, tied",
        {"pipeline_parallel": 2, "virtual_stages": 2, "context_parallel": 2},
    ),
    "CP2 x TP2+SP": (4, "qwen3 tied", {"context_parallel": 2, "tensor_parallel": 2}),
    "CP2 x TP2": (
        4,
        "qwen3",
        {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": False},
    ),
    "CP2 x PP2, tied": (4, "qwen3 tied", {"context_parallel": 2, "pipeline_parallel": 2}),
    "CP2 x TP2+SP x EP2": (
        4,
        "experts",
        {"context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2},
    ),
    "DP2 x CP2": (4, "qwen3", {"context_parallel": 2}),
    "DP2 x EP2 x TP2": (4, "experts", {"expert_parallel": 2, "tensor_parallel": 2}),
}
RECOMPUTED = (
    "TP2+SP, biases",
    "CP2 x TP2+SP",
    "PP2 x TP2+SP x EP2",
)  # of these, with activation checkpointing
BF16 = (2, "qwen3 tied", {"tensor_parallel": 2})
SOME = EVERYWHERE | {"targets": ["q_proj", "v_proj", "down_proj"]}
NO_EXPERTS = EVERYWHERE | {"targets": [*ATTENTION_AND_MLP[:4], "lm_head"]}
# Name: ranks, model, policy.megatron, model.lora.
LORA: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "TP2": (2, "qwen3 tied", {"tensor_parallel": 2, "sequence_parallel": False}, EVERYWHERE),
    "TP2+SP": (2, "qwen3", {"tensor_parallel": 2}, EVERYWHERE),
    "TP2+SP, biases, some layers": (2, "qwen2 tied", {"tensor_parallel": 2}, SOME),
    "PP2, tied": (2, "qwen3 tied", {"pipeline_parallel": 2}, EVERYWHERE),
    "PP2 x VP2": (
        2,
        "five layers, tied",
        {"pipeline_parallel": 2, "virtual_stages": 2},
        EVERYWHERE,
    ),
    "CP2": (2, "qwen3 tied", {"context_parallel": 2}, EVERYWHERE),
    "EP2 x TP2, no experts": (
        2,
        "experts",
        {"expert_parallel": 2, "tensor_parallel": 2},
        NO_EXPERTS,
    ),
    "PP2 x TP2+SP": (4, "llama", {"pipeline_parallel": 2, "tensor_parallel": 2}, EVERYWHERE),
}
LORA_RECOMPUTED = ("TP2+SP, biases, some layers", "PP2 x TP2+SP")
LORA_UPDATES = {
    "TP2+SP": (2, "qwen3 tied", {"tensor_parallel": 2}, EVERYWHERE),
    "PP2": (2, "llama", {"pipeline_parallel": 2}, EVERYWHERE),
}
UPDATES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "TP2+SP": (2, "qwen3 tied", {"tensor_parallel": 2}),
    "PP2, tied": (2, "qwen3 tied", {"pipeline_parallel": 2}),
    "PP2 x VP2, tied": (2, "five layers, tied", {"pipeline_parallel": 2, "virtual_stages": 2}),
    "DP2": (2, "qwen3", {}),
    "CP2": (2, "qwen3 tied", {"context_parallel": 2}),
    "EP2": (2, "experts", {"expert_parallel": 2}),
    "DP2 x TP2+SP": (4, "qwen3", {"tensor_parallel": 2}),
}
# Name: policy.megatron, the case; on 2 ranks, with "qwen3 tied" and its sequences.
KL: dict[str, tuple[dict[str, Any], KlCase]] = {
    "loss, adapters off, TP2+SP": (
        {"tensor_parallel": 2},
        KlCase({"coefficient": 0.3}, lora=EVERYWHERE),
    ),
    "loss, another model, PP2 x VP2": (
        {"pipeline_parallel": 2, "virtual_stages": 2},
        KlCase({"coefficient": 0.3, "estimator": "k3"}, other=True),
    ),
    "reward, another model, DP2": (
        {},
        KlCase(
            {"coefficient": 0.3, "estimator": "k1", "apply": "reward"}, lora=EVERYWHERE, other=True
        ),
    ),
}
# Checkpoints written in the first layout, on 2 ranks, from which each of the others resumes: ranks, policy.megatron.
RESUMES: dict[str, tuple[str, list[tuple[int, dict[str, Any]]]]] = {
    "TP2+SP": (
        "qwen3 tied",
        [(2, {"tensor_parallel": 2}), (2, {"pipeline_parallel": 2}), (4, {"tensor_parallel": 2})],
    ),
    "CP2": (
        "qwen3 tied",
        [
            (2, {"context_parallel": 2}),
            (2, {"tensor_parallel": 2}),
            (4, {"context_parallel": 2, "tensor_parallel": 2}),
        ],
    ),
    "PP2, tied": (
        "qwen2 tied",
        [(2, {"pipeline_parallel": 2}), (2, {"tensor_parallel": 2}), (2, {})],
    ),
    "PP2 x VP2, tied": (
        "five layers, tied",
        [
            (2, {"pipeline_parallel": 2, "virtual_stages": 2}),
            (2, {"pipeline_parallel": 2}),
            (4, {"pipeline_parallel": 2, "virtual_stages": 2}),
        ],
    ),
    "EP2 x TP2": (
        "experts",
        [
            (2, {"expert_parallel": 2, "tensor_parallel": 2}),
            (2, {"pipeline_parallel": 2}),
            (4, {"expert_parallel": 4}),
        ],
    ),
}
# The same, of adapters alone.
LORA_RESUMES: dict[str, tuple[str, list[tuple[int, dict[str, Any]]]]] = {
    "LoRA, TP2+SP": ("qwen3 tied", [(2, {"tensor_parallel": 2}), (2, {"pipeline_parallel": 2})]),
}
OTHERS = [
    (name, i)
    for name, (_, layouts) in (RESUMES | LORA_RESUMES).items()
    for i in range(len(layouts) - 1)
]
SPLITS = {"one budget for all": (4096, 0), "many micro-batches": (30, 1)}


@dataclass(eq=False)
class Lab:
    """Models and sequences in `folder`, and what the ranks made of them: `results[world_size][rank][case]`."""

    folder: Path
    results: dict[int, list[dict[str, Any]]] = field(default_factory=dict, repr=False)

    def of(self, kind: str, name: str) -> list[dict[str, Any]]:
        """What each rank made of the case of that kind and name."""
        ranks = {"gradients": GRADIENTS, "updates": UPDATES}[kind][name][0]
        return [rank[f"{kind}: {name}"] for rank in self.results[ranks]]

    def model(self, name: str) -> Path:
        path = self.folder / name.replace(" ", "-")
        if not path.exists():
            family, config = MODELS[name]
            save_tiny_model(path, family, **HEADS, **config)  # type: ignore[arg-type]
        return path

    @cache  # noqa: B019 (one lab a session)
    def sequences(self, model: str) -> list[TrainingSequence]:
        """Ragged sequences in trees, whose gradient has 0.25 as its largest entry, so that 1e-6 means something."""
        raw = make_sequences(self.model(model), 13, seed=1)
        _, gradients = gradients_of(load_model(self.model(model)), raw)
        scale = 0.25 / max(float(g.abs().max()) for g in gradients.values())
        return [replace(sequence, weight=scale * sequence.weight) for sequence in raw]

    @cache  # noqa: B019
    def batches(self, model: str) -> list[list[TrainingSequence]]:
        return [make_sequences(self.model(model), 9, seed=10 + i) for i in range(3)]

    def poisoned(self, model: str) -> list[list[TrainingSequence]]:
        """Three batches; one sequence of the second has no finite gradient."""
        first, (broken, *others), last = self.batches(model)
        return [first, [*others, replace(broken, advantage=float("inf"))], last]

    def adapters(self, name: str) -> dict[str, Tensor]:
        """Small enough that float32 knows the gradient's norm to 1e-6."""
        _, model, _, lora = LORA[name]
        return {
            name: 0.5 * each
            for name, each in make_adapters(self.model(model), lora, seed=3).items()
        }

    @cache  # noqa: B019
    def adapted_sequences(self, name: str) -> list[TrainingSequence]:
        """As `sequences`, by the gradient of the adapters."""
        _, model, _, lora = LORA[name]
        raw = make_sequences(self.model(model), 13, seed=1)
        _, gradients = gradients_of(load_model(self.model(model), lora, self.adapters(name)), raw)
        scale = 0.25 / max(float(g.abs().max()) for g in gradients.values())
        return [replace(sequence, weight=scale * sequence.weight) for sequence in raw]

    def kl_adapters(self, case: KlCase) -> dict[str, Tensor] | None:
        return make_adapters(self.model("qwen3 tied"), case.lora, seed=3) if case.lora else None

    def other_model(self) -> Path:
        """A reference of the same tokenizer, with another head than qwen3's tied one."""
        path = self.folder / "other"
        return path if path.exists() else save_tiny_model(path, tied=False, seed=5, **HEADS)

    def run(self, world_size: int) -> None:
        """Launch that many ranks on every case for so many."""
        cases: dict[str, tuple[str, dict[str, Any]]] = {}
        for name, (ranks, model, layout) in GRADIENTS.items():
            trees = self.sequences(model)
            flat = [replace(sequence, key=SequenceKey(i, 0)) for i, sequence in enumerate(trees)]
            splits = {split: (trees, *how) for split, how in SPLITS.items()}
            splits |= {"without trees": (flat, 100, 2), "fewer than ranks": (trees[:1], 64, 0)}
            if ranks == world_size:
                how = sections(layout, activation_checkpointing=name in RECOMPUTED)
                arguments = {"model": self.model(model), "sections": how, "splits": splits}
                cases[f"gradients: {name}"] = "gradients", arguments
        if world_size == BF16[0]:
            how = sections(BF16[2], param_dtype="bfloat16")
            splits = {"many micro-batches": (self.sequences(BF16[1]), 30, 1)}
            cases["gradients: bf16"] = (
                "gradients",
                {"model": self.model(BF16[1]), "sections": how, "splits": splits},
            )
        for name, (ranks, model, layout, lora) in LORA.items():
            if ranks == world_size:
                how = sections(layout, activation_checkpointing=name in LORA_RECOMPUTED) | {
                    "model": {"lora": lora}
                }
                splits = {
                    split: (self.adapted_sequences(name), *how_split)
                    for split, how_split in SPLITS.items()
                }
                arguments = {"model": self.model(model), "sections": how, "splits": splits}
                cases[f"LoRA: {name}"] = "gradients", arguments | {"adapters": self.adapters(name)}
        for name, (ranks, model, layout, lora) in LORA_UPDATES.items():
            how = training_sections(layout) | {"model": {"lora": lora}}
            common = {"model": self.model(model), "sections": how, "batches": self.batches(model)}
            if ranks == world_size:
                folder = self.folder / "adapters" / name
                cases[f"LoRA updates: {name}"] = "updates_of_adapters", common | {"folder": folder}
        if world_size == BF16[0]:
            how = training_sections(BF16[2]) | {"model": {"lora": EVERYWHERE}}
            how["policy"] |= {"param_dtype": "bfloat16"}
            common = {
                "model": self.model(BF16[1]),
                "sections": how,
                "batches": self.batches(BF16[1]),
            }
            cases["LoRA updates: bf16"] = (
                "updates_of_adapters",
                common | {"folder": self.folder / "adapters" / "bf16"},
            )
        for name, (layout, case) in KL.items() if world_size == 2 else ():
            kl = {**(case.kl or {}), "reference": str(self.other_model()) if case.other else None}
            how = sections(layout) | {"model": {"lora": case.lora}, "algorithm": {"kl": kl}}
            how |= {"rollout": {"sampling.temperature": TEMPERATURE}}
            arguments = {
                "model": self.model("qwen3 tied"),
                "sections": how,
                "adapters": self.kl_adapters(case),
            }
            cases[f"KL: {name}"] = (
                "gradients",
                arguments | {"splits": {"all": (self.batches("qwen3 tied")[0], 60, 1)}},
            )
        for name, (ranks, model, layout) in UPDATES.items():
            if ranks == world_size:
                common = {"model": self.model(model), "sections": training_sections(layout)}
                batches = {"clean": self.batches(model), "poisoned": self.poisoned(model)}
                cases[f"updates: {name}"] = (
                    "updates",
                    common | {"batches": batches, "fsdp": model == "qwen3 tied"},
                )
        for name, (model, (first, *others)) in (RESUMES | LORA_RESUMES).items():
            more = {"model": {"lora": EVERYWHERE}} if name in LORA_RESUMES else {}
            saved = {
                "model": self.model(model),
                "batches": self.batches(model),
                "folder": self.folder / "saved" / name,
            }
            if first[0] == world_size:
                cases[f"interrupted: {name}"] = (
                    "interrupted",
                    saved | {"sections": training_sections(first[1]) | more},
                )
            for i, (ranks, layout) in enumerate(others):
                if ranks == world_size:
                    rest = {
                        "sections": training_sections(layout) | more,
                        "batches": self.batches(model)[1:],
                    }
                    cases[f"resumed: {name} {i}"] = "resumed", saved | rest
        run = "tests.policy_megatron.workers:run_cases"
        self.results[world_size] = run_ranks(world_size, run, cases, timeout_s=600.0)


def sections(layout: dict[str, Any], **policy: Any) -> dict[str, dict[str, Any]]:
    return {
        "policy": {"backend": "megatron", "megatron": layout, **policy},
        "optimizer": {"max_grad_norm": float("inf")},
    }


def training_sections(layout: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return sections(layout) | {"run": {"steps": STEPS}, "optimizer": OPTIMIZER}
