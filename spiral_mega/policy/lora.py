"""Low-rank adapters of the FSDP policy, by peft."""

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

DEFAULT_ADAPTER = "default"


def add_lora(
    model: nn.Module, config: LoraConfig, seed: int, adapters: Sequence[str] = (DEFAULT_ADAPTER,)
) -> PeftModel:
    """Add adapters to the linear layers that `config` names, and freeze all else.

    The same seed gives the same start. Several `adapters` start alike; the first is active until
    `set_active_adapter`. Raises UserError for targets that the model lacks.
    """
    _check_targets(model, config)
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=list(config.targets),
        bias="none",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft warns that a tied head will be untied: it is merged into a tensor of its own
        # (fsdp/fsdp_weights.py).
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


def _check_targets(model: nn.Module, config: LoraConfig) -> None:
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    missing = sorted(set(config.targets) - names)
    if missing:
        raise UserError(
            f"model.lora.targets names {', '.join(missing)}, which this model lacks; its linear "
            f"layers are {', '.join(sorted(names))}: name some of these"
        )


def is_adapter_parameter(name: str, adapter: str) -> bool:
    """Return whether the parameter of that name is a factor of `adapter`."""
    return ".lora_" in name and name.endswith(f".{adapter}.weight")


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Leave out the adapters' contribution during this block.

    peft's own switch would change what requires a gradient.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def set_active_adapter(model: nn.Module, name: str) -> None:
    """Make `name` the adapter that contributes, again without peft's own switch."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module._active_adapter = [name]
