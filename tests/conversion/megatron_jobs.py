"""What the ranks do for test_megatron_conversion: checkpoints of megatron-core and of the policy on it, and loads."""

from pathlib import Path
from typing import Any

import torch

from spiral_mega.checkpoint.manager import CheckpointManager
from spiral_mega.distributed.runtime import Runtime
from tests.support.configs import make_config
from tests.support.megatron_on_cpu import install

install()

from megatron.core import dist_checkpointing  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: E402

from spiral_mega.models.model_config import read_model_config  # noqa: E402
from spiral_mega.policy.megatron.megatron_model import MegatronModel, build_model  # noqa: E402
from spiral_mega.policy.megatron.megatron_policy import MegatronPolicy  # noqa: E402
from spiral_mega.policy.megatron.parallel_layout import init_layout  # noqa: E402

Layout = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def save(
    runtime: Runtime,
    argument: tuple[
        dict[str, tuple[Path, Layout, Path]], dict[str, tuple[Path, Layout, Any, Path]]
    ],
) -> dict[str, Tensors]:
    """By megatron-core's saver: the models of the first argument's cases. By the trainer: checkpoints of policies whose
    weights were moved off their start, and what these were, by case."""
    models, policies = argument
    for folder, layout, target in models.values():
        (model,) = _model(runtime, folder, layout).stages
        if runtime.is_main:
            target.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), str(target))
    results = {}
    for name, (folder, layout, lora, target) in policies.items():
        config = make_config(
            folder, model={"lora": lora}, policy={"backend": "megatron", "megatron": layout}
        )
        policy = MegatronPolicy(config, runtime)
        for _, parameter in policy.model.trained.local_params:
            # As a function of the values, so that copies of a weight stay equal.
            parameter.data.add_(0.05 * torch.sin(100 * parameter.data) + 0.02)
        manager = CheckpointManager(target, keep_last=1)
        meta = {
            "world_size": runtime.world_size,
            "data": "",
            "config": config.model_dump(mode="json"),
        }
        manager.save(1, {"step": 1, "policy": policy.state_dict()}, meta)
        manager.wait()
        results[name] = {name: tensor.clone() for name, tensor in policy.weights()}
    return results


def load_converted(
    runtime: Runtime,
    argument: tuple[dict[str, tuple[Path, Layout, Path]], dict[str, tuple[Path, Layout, Path]]],
) -> dict[str, Tensors]:
    """The weights that megatron-core's loader brings into models of other weights, and a load of the trainer's format
    into policies of other weights."""
    models, policies = argument
    results = {}
    for name, (folder, layout, origin) in models.items():
        shards = _model(runtime, folder, layout)
        (model,) = shards.stages
        wanted = {"model": _as_transformer_engine_names(model).sharded_state_dict()}
        model.load_state_dict(dist_checkpointing.load(wanted, str(origin))["model"])
        results[name] = _streamed(shards)
    for name, (folder, layout, origin) in policies.items():
        policy = MegatronPolicy(
            make_config(folder, policy={"backend": "megatron", "megatron": layout}), runtime
        )
        state = policy.state_dict()
        load({"policy": {"param": state["param"]}}, checkpoint_id=origin)
        policy.load_state_dict(state)
        results[name] = _streamed(policy.model)
    return results


def _model(runtime: Runtime, folder: Path, layout: Layout) -> MegatronModel:
    config = make_config(folder, policy={"backend": "megatron", "megatron": layout})
    return build_model(
        config,
        config.model,
        read_model_config(str(folder)),
        init_layout(config.policy.megatron, 0),
        runtime,
    )


def _as_transformer_engine_names(model: Any) -> Any:
    """With the names that Megatron's usual settings give experts: layers stacked, their norm no part of a linear."""
    if model.config.num_moe_experts:
        model.config.moe_layer_freq = 1
        for layer in model.decoder.layers:
            layer.submodules_config.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return model


def _streamed(shards: MegatronModel) -> Tensors:
    return {
        name: each.clone()
        for name, each in shards.weights.stream(torch.Tensor.detach, torch.float32, 2**16)
    }
