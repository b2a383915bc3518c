"""Run megatron-core on a machine without a GPU, for tests: CUDA calls go to the CPU, streams do nothing.

megatron-core names the current CUDA device wherever it allocates; here that name stands for the CPU. Nothing else of
it is changed: its parallel layers, schedules, buffers and optimizer are the real ones. The trainer's own command runs
as `python -m tests.support.megatron_on_cpu train configs/demo_megatron.yaml`, under torchrun.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.utils._device import _device_constructors

FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")
LIKE = ("empty_like", "full_like", "ones_like", "zeros_like")


class Idle(MagicMock):
    """A stream or event whose work is always finished."""


def install() -> None:
    """Patch torch and megatron-core; call once in a process, before megatron.core is imported."""
    if getattr(torch.cuda, "stands_for_cpu", False) or torch.cuda.is_available():
        return
    _device_constructors()  # cached: `with torch.device(...)` must still recognize the original functions below
    for name in (*FACTORIES, *LIKE):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    torch.Tensor.type = _type_as_on_cuda(torch.Tensor.type)  # type: ignore[method-assign]
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda._lazy_call = lambda call, *_, **__: call()
    cuda.default_generators = [torch.default_generator]
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.default_stream = Idle
    cuda.stream = lambda *_: nullcontext()
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.stands_for_cpu = True
    _patch_megatron()


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _type_as_on_cuda(real: Callable[..., Any]) -> Callable[..., Any]:
    """megatron-core's optimizers compare the names of types, "torch.cuda.FloatTensor" and others."""

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return named


def _patch_megatron() -> None:
    """Patch where megatron-core checks that a tensor is on a GPU, or reads a GPU generator's state."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    def counts(tensor: torch.Tensor, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = counts


if __name__ == "__main__":
    install()
    from spiral_mega.__main__ import main

    main()
