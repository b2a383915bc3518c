"""What the ranks do for test_conversion: checkpoints as the trainer writes them, a load by FSDP2, and vLLM."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load

from spiral_mega.checkpoint.manager import CheckpointManager
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.policy.fsdp.fsdp_policy import FsdpPolicy
from spiral_mega.rollout.vllm_engine import ENVIRONMENT, contained
from tests.support.configs import make_config


def train_and_load(
    runtime: Runtime, argument: tuple[dict[str, Any], dict[str, tuple[Path, Path]]]
) -> dict[str, Any]:
    """Save a checkpoint of every case (folder of its model, model.lora) with weights moved off their start; the whole
    merged weights by case. And of each pair of a model and a checkpoint what FSDP2 has after loading the one into the
    other."""
    cases, converted = argument
    results: dict[str, Any] = {}
    for name, (folder, lora, out) in cases.items():
        config = make_config(folder, model={"lora": lora})
        policy = FsdpPolicy(config, runtime)
        torch.manual_seed(5 + runtime.rank)
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.05 * torch.randn_like(parameter))
        manager = CheckpointManager(out, keep_last=1)
        meta = {
            "world_size": runtime.world_size,
            "data": "",
            "config": config.model_dump(mode="json"),
        }
        manager.save(1, {"step": 1, "policy": policy.state_dict()}, meta)
        manager.wait()
        results[name] = {name: tensor.clone() for name, tensor in policy.weights()}
    for name, (model, checkpoint) in converted.items():
        policy = FsdpPolicy(make_config(model), runtime)
        for parameter in policy.model.parameters():
            parameter.data.zero_()
        state = {"policy": {"model": policy.state_dict()["model"]}}
        load(state, checkpoint_id=checkpoint)
        results[name] = {name: tensor.clone() for name, tensor in policy.weights()}
    return results


def in_vllm(
    runtime: Runtime, argument: tuple[Path, Path, Path, list[int]]
) -> dict[str, list[float]]:
    """Log-probs of each token after the first, by vLLM with the merged model, and with base and adapter."""
    merged, base, adapter, tokens = argument
    os.environ.update(ENVIRONMENT)
    with contained(runtime):
        from vllm import LLM, SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest

        common = {
            **{
                "distributed_executor_backend": "external_launcher",
                "enforce_eager": True,
                "dtype": "float32",
            },
            **{"kv_cache_memory_bytes": 16 * 2**20, "block_size": 32, "max_model_len": 64},
        }
        engines = {
            "merged": LLM(model=str(merged), **common),
            "adapter": LLM(model=str(base), enable_lora=True, max_lora_rank=8, **common),
        }
        found = {}
        for name, engine in engines.items():
            request = LoRARequest("adapter", 1, str(adapter)) if name == "adapter" else None
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            (output,) = engine.generate(
                TokensPrompt(prompt_token_ids=tokens), params, lora_request=request
            )
            entries = output.prompt_logprobs[1:]
            found[name] = [
                entry[token].logprob for token, entry in zip(tokens[1:], entries, strict=True)
            ]
    engines["merged"].llm_engine.engine_core.shutdown()
    return found
