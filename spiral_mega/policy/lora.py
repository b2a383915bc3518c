"""Low-rank adapters by peft."""

from __future__ import annotations

import warnings

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from torch import nn

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
        # A tied head is merged into a tensor of its own (see policy/fsdp/weights.py), which is what peft warns about.
        warnings.filterwarnings("ignore", message=".*tie.*")
        torch.manual_seed(seed)
        adapted = get_peft_model(model, peft_config, adapter_name=ADAPTER)
    assert isinstance(adapted, PeftModel)
    return adapted
