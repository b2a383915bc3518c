"""Tiles on a GPU: the forward kernel never lets a logit leave the registers; the backward kernel computes logits again.

It writes the gradient of a strip of the vocabulary at a time, in the type of the inputs; torch's matrix products, which
no kernel of ours would beat, do the rest (see gradients.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from spiral_mega.kernels.gradients import Gradients, Tiling, accumulate
from spiral_mega.kernels.logits import Logits, Statistics, Upstream
from spiral_mega.kernels.triton_kernels import gradient_kernel, statistics_kernel

KEPT_ELEMENTS = 0  # logits do not leave the registers, so there are none to keep
STRIP_ELEMENTS = 2**26  # of the gradient at a time: 128 MiB in bfloat16, wide enough for products at full speed
ROW_GROUP = 8  # blocks of rows that go through the vocabulary together, so that L2 serves both operands


@dataclass(frozen=True, slots=True)
class Blocks:
    """The tile of one program, m rows by n vocabulary entries, read k features at a time."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


def blocks(dtype: torch.dtype, plain: bool, sm: int) -> Blocks:
    """The widest tile that spills no register (tested). `plain`: statistics of logits with neither adapter nor softcap.

    Whole warp groups' wgmma on sm_90 has room for 256 entries there; float32 products take no tensor cores.
    """
    if dtype.itemsize == 4:
        return Blocks(64, 64, 32, 4, 3)
    return Blocks(128, 256 if plain and sm == 90 else 128, 64, 8, 3)


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.float64:
        raise ValueError("backend 'triton' takes no float64: use reference")
    return dtype


def arguments(logits: Logits, *, gradient: bool, sm: int) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Tensors of the logits, numbers, and constants, as both kernels take them."""
    (x, w), *others = ((x.contiguous(), w.contiguous()) for x, w in logits.terms)
    x2, w2 = others[0] if others else (x, w)
    size = blocks(x.dtype, not (gradient or others or logits.softcap), sm)
    block_k2 = max(16, min(triton.next_power_of_2(x2.shape[1]), size.k)) if others else 0
    constants = {
        "BLOCK_M": size.m,
        "BLOCK_N": size.n,
        "BLOCK_K": size.k,
        "BLOCK_K2": block_k2,
        "EVEN_K": x.shape[1] % size.k == 0,
        "HAS_BIAS": logits.bias is not None,
        "HAS_SOFTCAP": logits.softcap is not None,
        "GROUP": ROW_GROUP,
        "UPCAST": triton.knobs.runtime.interpret and x.dtype != torch.float32,
        "num_warps": size.num_warps,
        "num_stages": size.num_stages,
    }
    tensors = [x, w, x2, w2, x if logits.bias is None else logits.bias]
    return tensors, [*logits.shape, x.shape[1], x2.shape[1], 1 / logits.temperature, logits.softcap or 1.0], constants


def statistics(logits: Logits, targets: torch.Tensor, with_dot: bool) -> Statistics:
    tensors, numbers, constants = arguments(logits, gradient=False, sm=_sm(targets.device))
    num_rows, num_columns = logits.shape
    row_blocks, tiles = triton.cdiv(num_rows, constants["BLOCK_M"]), triton.cdiv(num_columns, constants["BLOCK_N"])
    tiles_per_split = triton.cdiv(
        max(tiles, 1), max(1, triton.cdiv(4 * _processors(targets.device), max(row_blocks, 1)))
    )
    splits = max(1, triton.cdiv(tiles, tiles_per_split))
    out = torch.empty(4, splits, num_rows, dtype=torch.float32, device=targets.device)
    if num_rows:
        statistics_kernel[(row_blocks * splits,)](
            *tensors, targets, out, *numbers, splits, tiles_per_split, WITH_DOT=with_dot, **constants
        )
    return Statistics(*out).merged()


def add_gradients(gradients: Gradients, logits: Logits, upstream: Upstream) -> None:
    num_rows, num_columns = logits.shape
    width = 1024 * max(1, STRIP_ELEMENTS // (1024 * max(1, num_rows)))
    input = logits.terms[0].input
    sm = _sm(input.device)
    scratch = input.new_empty(num_rows * min(width, num_columns))

    def tile_gradient(tile: Logits, upstream: Upstream) -> torch.Tensor:
        tensors, numbers, constants = arguments(tile, gradient=True, sm=sm)
        rows, columns = tile.shape
        out = scratch[: rows * columns].view(rows, columns)
        grid = (triton.cdiv(rows, constants["BLOCK_M"]) * triton.cdiv(columns, constants["BLOCK_N"]),)
        of_entropy = upstream.of_softmax if upstream.of_entropy is None else upstream.of_entropy
        gradient_kernel[grid](
            *tensors, upstream.targets, upstream.logsumexp, upstream.of_target, upstream.of_softmax, of_entropy, out,
            *numbers, HAS_ENTROPY=upstream.of_entropy is not None, **constants,
        )  # fmt: skip
        return out

    accumulate(gradients, logits, upstream, Tiling(max(num_rows, 1), width), tile_gradient)


def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1  # the interpreter


def _sm(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor
