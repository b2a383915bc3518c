"""Low-rank adapters by peft, and the merged weights that engines and exports want."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor

from spiral_mega.config import LoraConfig
from spiral_mega.errors import UserError

ADAPTER = "default"


def add_lora(model: nn.Module, config: LoraConfig, seed: int) -> PeftModel:
    """`model` with adapters on the named linear layers; only they train. The same seed gives the same start."""
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if missing := sorted(set(config.targets) - names):
        raise UserError(
            f"model.lora.targets names {', '.join(missing)}, which this model lacks; its linear layers are "
            f"{', '.join(sorted(names))}: name some of these"
        )
    peft_config = PeftLoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=list(config.targets), bias="none"
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # A tied head is merged into a tensor of its own (see full_weights), which is what peft warns about.
        warnings.filterwarnings("ignore", message=".*tie.*")
        torch.manual_seed(seed)
        adapted = get_peft_model(model, peft_config, adapter_name=ADAPTER)
    assert isinstance(adapted, PeftModel)
    return adapted


def full_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors by Hugging Face name, one at a time, adapters merged: W + scale * B A, in W's own type.

    A tied head comes as a tensor of its own. Gathering is collective: every rank must iterate to the end.
    """
    any_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        if parameter.requires_grad and any_sharded and not isinstance(parameter, DTensor):
            raise RuntimeError(f"{name} is unsharded, so it holds a copy in compute type and not the weight itself")
        tensor = gather(parameter)
        owner, _, leaf = name.rpartition(".")
        if owner.endswith(".base_layer") or owner == "base_layer":
            owner = owner.removesuffix("base_layer").removesuffix(".")
            if leaf == "weight":
                layer: Any = base.get_submodule(owner)
                update = gather(layer.lora_B[ADAPTER].weight) @ gather(layer.lora_A[ADAPTER].weight)
                tensor = (tensor.float() + layer.scaling[ADAPTER] * update.float()).to(tensor.dtype)
            name = f"{owner}.{leaf}"
        yield name, tensor


def gather(parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a possibly sharded parameter, detached, on every rank."""
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()
