"""Read and write a LoRA adapter in the files of PEFT, which vLLM loads as well.

A folder holds adapter_config.json (rank r, alpha) and adapter_model.safetensors, with two factors
for each adapted linear layer of the base: base_model.model.<layer>.lora_A.weight [r, in] and
...lora_B.weight [out, r].
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from spiral_mega.errors import UserError
from spiral_mega.models.safetensors_files import read_file, shorten

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Settings of PEFT under which the update is not scale * B A, and their harmless values.
UNSUPPORTED: dict[str, Any] = {
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_qalora": False,
}


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """The update of a weight [out, in]: scale * B [out, r] @ A [r, in]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank updates by the name of the weight that each one changes.

    Alpha / rank is their scale.
    """

    updates: dict[str, LowRankUpdate]
    rank: int
    alpha: float

    @classmethod
    def from_factors(
        cls,
        tensors: Mapping[str, torch.Tensor],
        rank: int,
        alpha: float,
        origin: Path,
    ) -> Adapter:
        """Pair factors, given by PEFT's names.

        Raises UserError if one has another name or rank; `origin` is named.
        """
        return cls(_pair_factors(tensors, rank, alpha / rank, origin), rank, alpha)

    def factors(self) -> dict[str, torch.Tensor]:
        """Return the factors by PEFT's names."""
        tensors = {}
        for weight, update in self.updates.items():
            name_a, name_b = factor_names(weight)
            tensors[name_a], tensors[name_b] = update.a, update.b
        return tensors

    def peft_config(self, base: str) -> LoraConfig:
        """Return what PEFT and vLLM need to know about this adapter of the model `base`."""
        targets = {name.removesuffix(".weight").rpartition(".")[2] for name in self.updates}
        return LoraConfig(
            r=self.rank,
            lora_alpha=int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            lora_dropout=0.0,
            target_modules=sorted(targets),
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
            inference_mode=True,
        )


def factor_names(weight: str) -> tuple[str, str]:
    """Return PEFT's names of the factors A and B of a weight."""
    layer = PREFIX + weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def read_peft(folder: Path) -> Adapter:
    """Read the adapter in a PEFT folder.

    Raises UserError if it is damaged, or if its update is not scale * B A.
    """
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        peft_type, rank, alpha = config["peft_type"], int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / CONFIG} cannot be read ({error!r}): copy the adapter again"
        ) from error
    unsupported = []
    for key, value in UNSUPPORTED.items():
        if config.get(key, value) not in (value, None):
            unsupported.append(f"{key}={config[key]!r}")
    if peft_type != "LORA" or unsupported:
        raise UserError(
            f"{folder} is not a plain LoRA adapter ({peft_type}, {', '.join(unsupported)}): merge "
            "it with peft"
        )
    tensors = {name: stored.read() for name, stored in read_file(folder / WEIGHTS).items()}
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter(_pair_factors(tensors, rank, scale, folder), rank, scale * rank)


def write_peft(adapter: Adapter, base: str, dtype: torch.dtype | None, folder: Path) -> None:
    """Write `adapter` of the model `base` into `folder`, in `dtype` or the factors' own."""
    tensors = {
        name: factor.to(dtype or factor.dtype).contiguous()
        for name, factor in adapter.factors().items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    adapter.peft_config(base).save_pretrained(folder)


def _pair_factors(
    tensors: Mapping[str, torch.Tensor], rank: int, scale: float, origin: Path
) -> dict[str, LowRankUpdate]:
    layers: dict[str, dict[str, torch.Tensor]] = {}
    unknown = []
    for name, tensor in tensors.items():
        layer, _, side = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if not (
            name.startswith(PREFIX) and name.endswith(".weight") and side in ("lora_A", "lora_B")
        ):
            unknown.append(name)
        layers.setdefault(layer, {})[side] = tensor
    if unknown:
        raise UserError(
            f"{origin} holds {shorten(sorted(unknown))}, which is no factor of a linear layer's update"
        )
    updates = {}
    for layer, sides in layers.items():
        if (
            sides.keys() != {"lora_A", "lora_B"}
            or len(sides["lora_A"]) != rank
            or sides["lora_B"].shape[1] != rank
        ):
            shapes = {side: tuple(tensor.shape) for side, tensor in sides.items()}
            raise UserError(
                f"the factors of {layer} in {origin} are {shapes}, not of rank {rank}: copy it again"
            )
        updates[f"{layer}.weight"] = LowRankUpdate(sides["lora_A"], sides["lora_B"], scale)
    return updates
