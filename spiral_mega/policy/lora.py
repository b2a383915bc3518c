"""Low-rank adapters by peft."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from spiral_mega.config import LoraConfig
from spiral_mega.errors import UserError

ADAPTER = "default"


def add_lora(model: nn.Module, config: LoraConfig, seed: int, adapters: Sequence[str] = (ADAPTER,)) -> PeftModel:
    """`model` with adapters on the named linear layers; only they train. The same seed gives the same start.

    Several `adapters` start alike; the first is the one in use until `use_adapter` says otherwise.
    """
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
        adapted = get_peft_model(model, peft_config, adapter_name=adapters[0])
        assert isinstance(adapted, PeftModel)
        for name in adapters[1:]:
            torch.manual_seed(seed)
            adapted.add_adapter(name, peft_config)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return adapted


def is_of(adapter: str, parameter: str) -> bool:
    """Whether the parameter of that name is a factor of the adapter."""
    return ".lora_" in parameter and parameter.endswith(f".{adapter}.weight")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Low-rank adapters contribute nothing meanwhile. Not peft's own switch, which changes what requires a gradient."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def use_adapter(model: nn.Module, name: str) -> None:
    """From now on the adapter of that name is the one that contributes; again not by peft's own switch."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module._active_adapter = [name]
