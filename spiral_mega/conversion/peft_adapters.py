"""Low-rank adapters: read from a PEFT folder or the trainer's checkpoint, written as PEFT's, or merged."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from spiral_mega.conversion.sources import Factors, Source, whole
from spiral_mega.errors import UserError
from spiral_mega.models.safetensors_files import read_file, shorten
from spiral_mega.policy.lora import ADAPTER

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ROOT = "base_model.model."
# What would change the update into something other than scale * B A.
REFUSED = {
    **{"bias": "none", "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None},
    **{"rank_pattern": {}, "alpha_pattern": {}, "use_qalora": False},
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """Updates by the name of the weight that they belong to; `alpha` over the rank is their scale."""

    updates: dict[str, Factors]
    rank: int
    alpha: float


def read_peft(folder: Path) -> Adapter:
    """The adapter in a PEFT folder. Raises UserError for one that is more than scale * B A, or damaged."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        kind, rank, alpha = config["peft_type"], int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / CONFIG} cannot be read ({error!r}): copy the adapter again") from error
    strange = [
        f"{key}={config[key]!r}" for key, value in REFUSED.items() if config.get(key, value) not in (value, None)
    ]
    if kind != "LORA" or strange:
        raise UserError(f"{folder} is not a plain LoRA adapter ({kind}, {', '.join(strange)}): merge it with peft")
    tensors = {name: stored.read() for name, stored in read_file(folder / WEIGHTS).items()}
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter(pair(tensors, ".weight", scale, rank, folder), rank, scale * rank)


def read_trained(source: Source, lora: dict[str, Any], folder: Path, name: str = ADAPTER) -> Adapter:
    """The adapter of that name in the trainer's checkpoint; `lora` is model.lora of its configuration."""
    # FSDP2's checkpoints name the adapter, megatron-core's have the names of PEFT's files.
    tensors = {each.replace(f".{name}.weight", ".weight"): whole(source, each) for each in source.forms}
    rank, alpha = int(lora["rank"]), float(lora["alpha"])
    return Adapter(pair(tensors, ".weight", alpha / rank, rank, folder), rank, alpha)


def pair(tensors: dict[str, torch.Tensor], end: str, scale: float, rank: int, folder: Path) -> dict[str, Factors]:
    """The factors of each layer's update, by its weight's name. Raises UserError if they are not of that rank."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    strange = []
    for name, tensor in tensors.items():
        layer, _, side = name.removeprefix(ROOT).removesuffix(".weight").rpartition(".")
        if not (name.startswith(ROOT) and name.endswith(".weight") and side in ("lora_A", "lora_B")):
            strange.append(name)
        layers.setdefault(layer, {})[side] = tensor
    if strange:
        raise UserError(f"{folder} holds {shorten(sorted(strange))}, which is no factor of a linear layer's update")
    for layer, sides in layers.items():
        if sides.keys() != {"lora_A", "lora_B"} or len(sides["lora_A"]) != rank or sides["lora_B"].shape[1] != rank:
            shapes = {side: tuple(tensor.shape) for side, tensor in sides.items()}
            raise UserError(f"the factors of {layer} in {folder} are {shapes}, not of rank {rank}: copy it again")
    return {f"{layer}.weight": Factors(each["lora_A"], each["lora_B"], scale) for layer, each in layers.items()}


def check_adapter(adapter: Adapter, expected: dict[str, torch.Size], origin: Path, base: Path) -> None:
    """Raise UserError unless every update fits a weight of the base."""
    problems = []
    for name, update in adapter.updates.items():
        shape = torch.Size([len(update.b), update.a.shape[1]])
        if name not in expected:
            problems.append(f"{name} is not in the base")
        elif expected[name] != shape:
            problems.append(f"{name} is {tuple(expected[name])} in the base, the update {tuple(shape)}")
    if problems:
        raise UserError(f"{origin} does not belong to {base}: {shorten(sorted(problems))}; give its own base by --base")


def peft_config(adapter: Adapter, base: str) -> LoraConfig:
    """What peft and vLLM need to know of it."""
    names = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in adapter.updates})
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        lora_dropout=0.0,
        target_modules=names,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )


def peft_tensors(adapter: Adapter) -> dict[str, torch.Tensor]:
    """Factors by the names of PEFT's files."""
    tensors: dict[str, torch.Tensor] = {}
    for name, update in adapter.updates.items():
        layer = ROOT + name.removesuffix(".weight")
        tensors |= {f"{layer}.lora_A.weight": update.a, f"{layer}.lora_B.weight": update.b}
    return tensors


def write_peft(adapter: Adapter, base: str, dtype: torch.dtype | None, folder: Path) -> None:
    tensors = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in peft_tensors(adapter).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    peft_config(adapter, base).save_pretrained(folder)
