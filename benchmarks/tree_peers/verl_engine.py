"""verl 0.9.1: its FSDP2 engine and its loss, with padding (`use_remove_padding` off, as flash-attn needs a GPU),
micro-batches of 16 sequences, gradient checkpointing and torch.compile off as in the other contenders.

verl knows no CPU; a platform is registered that says so, by its own plug-in.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA

from .batch import CLIP, LEARNING_RATE, SAMPLER_LOGPROB, Item, batch


class Cpu(PlatformCUDA):
    """What verl asks of a device, answered for the CPU."""

    device_name = "cpu"
    device_module = torch.cpu
    is_available = lambda self: True  # noqa: E731
    current_device = lambda self: "cpu"  # noqa: E731
    device_count = lambda self: 1  # noqa: E731
    manual_seed = manual_seed_all = lambda self, seed: None
    empty_cache = synchronize = lambda self, *_: None
    nvtx_range = lambda self, msg: nullcontext()  # noqa: E731
    communication_backend_name = lambda self: "gloo"  # noqa: E731


platform_manager.set_platform(Cpu())

from tensordict import TensorDict  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import (  # noqa: E402  # noqa: E402
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402


def padded(folder: str, problems: int) -> dict[str, float]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    model = HFModelConfig(
        path=folder,
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    fsdp = FSDPEngineConfig(
        strategy="fsdp2",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        use_torch_compile=False,
    )
    engine = FSDPEngineWithLMHead(
        model, fsdp, FSDPOptimizerConfig(lr=LEARNING_RATE), CheckpointConfig()
    )
    engine._build_model_optimizer()
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=16,
        clip_ratio_low=CLIP,
        clip_ratio_high=CLIP,
        clip_ratio_c=float("inf"),  # the others know no second bound
    )
    loss = partial(ppo_loss, actor)

    engine.train_batch(_data(batch(1, response=2)), loss)
    items = batch(problems)
    start = time.process_time()
    found = engine.train_batch(_data(items), loss)
    return {"cpu": time.process_time() - start, "loss": sum(found["loss"])}


def _data(items: list[Item]) -> TensorDict:
    """A batch as its trainer hands it over: jagged sequences, and what the loss asks for by response token."""

    def ragged(rows: Any) -> torch.Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    def per_token(value: Any) -> torch.Tensor:
        return ragged([[value(item)] * len(item.response) for item in items])

    columns: dict[str, Any] = {
        "input_ids": ragged([[*item.prompt, *item.response] for item in items]),
        "position_ids": ragged([range(len(item.prompt) + len(item.response)) for item in items]),
        "prompts": ragged([item.prompt for item in items]),
        "responses": ragged([item.response for item in items]),
        "response_mask": per_token(lambda item: 1),
        "loss_mask": per_token(lambda item: 1),
        "old_log_probs": per_token(lambda item: SAMPLER_LOGPROB),
        "advantages": per_token(lambda item: item.advantage),
    }
    data = TensorDict(columns, batch_size=[len(items)])
    tensordict_utils.assign_non_tensor(
        data,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=16,
        calculate_entropy=True,
        temperature=1.0,
        global_batch_size=len(items),
    )
    return data
