"""Build a transformers causal model and shard it by FSDP2 from outside: the model's own code is
unchanged.

all ranks    build on the meta device -> apply FSDP -> allocate the shards -> receive them from rank 0
rank 0       read the files into CPU memory -------------------------------^
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PretrainedConfig

from spiral_mega.config import LoraConfig, ModelConfig, PolicyConfig
from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import UserError
from spiral_mega.models.model_config import read_model_config
from spiral_mega.packing.attention import check_model
from spiral_mega.policy.fsdp.head import LogitTransform, detect_logit_transform, register_logprobs
from spiral_mega.policy.lora import DEFAULT_ADAPTER, add_lora

log = logging.getLogger(__name__)


def build_model(
    model_config: ModelConfig,
    config: PolicyConfig,
    runtime: Runtime,
    seed: int,
    adapters: Sequence[str] = (DEFAULT_ADAPTER,),
) -> Any:
    """Build the model of `model_config`, sharded over all ranks, with float32 master weights;
    collective.

    It has `adapters` if `model_config` asks for LoRA, and a method `logprobs` (see head.py). Only
    rank 0 reads the files; the others receive their shards from it. No rank puts the whole model on
    its accelerator. Raises UserError, on every rank, for a model that cannot be built or read.
    """
    hf_config = read_model_config(model_config.path)
    attention = runtime.choose_attention(getattr(torch, config.param_dtype), config.attention)
    model, logit_transform = build_empty_model(
        model_config, hf_config, config, attention, seed, adapters
    )
    weights = _read_on_rank_0(model_config, hf_config, runtime, seed, adapters)
    apply_fsdp(model, config)
    allocate_weights(model, runtime.device)
    set_model_state_dict(
        model,
        weights,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True),
    )
    register_logprobs(model, logit_transform)
    return model.train()


def build_empty_model(
    model_config: ModelConfig,
    hf_config: PretrainedConfig,
    config: PolicyConfig,
    attention: str,
    seed: int,
    adapters: Sequence[str] = (DEFAULT_ADAPTER,),
) -> tuple[Any, LogitTransform]:
    """Build the model of `hf_config` on the meta device, with adapters if asked for; also return
    its logit transform.

    Raises UserError for a model that transformers does not know, or that token trees do not
    support.
    """
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=torch.float32, attn_implementation=attention
            )
        check_model(model)
    except (ValueError, ImportError) as error:
        raise UserError(
            f"the model at {model_config.path} cannot be built with policy.attention "
            f"{config.attention!r} ({error}): use auto, or a causal language model that "
            "transformers knows"
        ) from error
    model.tie_weights()  # emptying the weights untied them
    logit_transform = detect_logit_transform(model)
    with init_empty_weights(include_buffers=False):
        return _add_adapters(model, model_config.lora, seed, adapters), logit_transform


def _add_adapters(model: Any, lora: LoraConfig | None, seed: int, adapters: Sequence[str]) -> Any:
    return model if lora is None else add_lora(model, lora, seed, adapters)


def _read_on_rank_0(
    model: ModelConfig,
    hf_config: PretrainedConfig,
    runtime: Runtime,
    seed: int,
    adapters: Sequence[str],
) -> dict[str, Any]:
    """Read the whole weights on rank 0, none elsewhere. A failure there is raised on every rank, so that none waits."""
    weights: dict[str, Any] = {}
    problem = ""
    if runtime.is_main:
        try:
            weights = _read_weights(model, hf_config, seed, adapters)
        except Exception as error:  # of any kind: the other ranks have to be told
            log.debug("reading %s failed", model.path, exc_info=True)
            problem = f"the weights at model.path {model.path!r} do not load ({type(error).__name__}: {error})"
    problem = gather_objects(problem)[0]
    if problem:
        raise UserError(f"{problem}: copy the model again, or name another")
    return weights


def _read_weights(
    model: ModelConfig, hf_config: PretrainedConfig, seed: int, adapters: Sequence[str]
) -> dict[str, torch.Tensor]:
    source, info = AutoModelForCausalLM.from_pretrained(
        model.path,
        config=hf_config,
        dtype=torch.float32,
        low_cpu_mem_usage=True,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would initialise these at random
        others = " and others" if len(missing) > 3 else ""
        raise ValueError(f"no {', '.join(missing[:3])}{others} in its files")
    return _add_adapters(source, model.lora, seed, adapters).state_dict()


def apply_fsdp(model: Any, config: PolicyConfig) -> None:
    """Shard `model`: each decoder layer is a unit, the rest (embedding, norm, head) is the root's.

    Gradients are summed over ranks, not averaged. Raises ValueError for a model that does not name
    its layers.
    """
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype), reduce_dtype=torch.float32
    )
    layer_types = set(model._no_split_modules or [])
    layers = [module for module in model.modules() if type(module).__name__ in layer_types]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} does not name its decoder layers (_no_split_modules): cannot "
            "shard it"
        )
    for module in [*layers, model]:
        fully_shard(module, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def allocate_weights(model: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory on `device`; buffers (rotary frequencies) are computed already
    and keep their values.

    Sharded parameters are allocated in place, so shared ones stay shared.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
