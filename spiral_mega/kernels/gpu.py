"""Tiles of logits on GPU, by Triton kernels.

The forward kernel keeps logits in registers. The backward kernel computes them again and writes the
gradient of a strip of the vocabulary at a time, in the dtype of the inputs; torch's matrix
products, which no kernel of ours would beat, do the rest (see gradients.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from spiral_mega.kernels.gradients import Gradients, Tiling, accumulate
from spiral_mega.kernels.logits import LogitGradient, Logits, Statistics
from spiral_mega.kernels.triton_kernels import gradient_kernel, statistics_kernel

MAX_SAVED_LOGITS = 0  # logits do not leave the registers, so there are none to save
STRIP_ELEMENTS = (
    2**26
)  # of the gradient at a time: 128 MiB in bfloat16, wide enough for products at full speed
ROW_GROUP = (
    8  # blocks of rows that go through the vocabulary together, so that L2 serves both operands
)


@dataclass(frozen=True, slots=True)
class TileSize:
    """The tile of one program: m rows by n vocabulary entries, read k features at a time."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


class KernelArguments(NamedTuple):
    """Arguments that both kernels take, in their order: the logits' tensors, numbers, and compile-time constants."""

    tensors: list[torch.Tensor]
    numbers: list[int | float]
    constants: dict[str, Any]


def choose_tile(dtype: torch.dtype, plain: bool, sm: int) -> TileSize:
    """Choose the widest tile that spills no register (tested).

    `plain`: for statistics of logits with neither adapter nor softcap. The wgmma of whole warp
    groups on sm_90 has room for 256 entries there. Products in float32 use no tensor cores.
    """
    if dtype.itemsize == 4:
        return TileSize(64, 64, 32, 4, 3)
    return TileSize(128, 256 if plain and sm == 90 else 128, 64, 8, 3)


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products are taken. Raises ValueError for float64."""
    if dtype == torch.float64:
        raise ValueError("backend 'triton' takes no float64: use reference")
    return dtype


def kernel_arguments(logits: Logits, *, gradient: bool, sm: int) -> KernelArguments:
    """Return the arguments of the `gradient` or the statistics kernel on a device of compute capability `sm`."""
    (x, w), *others = ((x.contiguous(), w.contiguous()) for x, w in logits.terms)
    x2, w2 = others[0] if others else (x, w)
    tile = choose_tile(x.dtype, not (gradient or others or logits.softcap), sm)
    block_k2 = max(16, min(triton.next_power_of_2(x2.shape[1]), tile.k)) if others else 0
    constants = {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "BLOCK_K2": block_k2,
        "EVEN_K": x.shape[1] % tile.k == 0,
        "HAS_BIAS": logits.bias is not None,
        "HAS_SOFTCAP": logits.softcap is not None,
        "GROUP": ROW_GROUP,
        "UPCAST": triton.knobs.runtime.interpret and x.dtype != torch.float32,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    tensors = [x, w, x2, w2, x if logits.bias is None else logits.bias]
    numbers = [
        *logits.shape,
        x.shape[1],
        x2.shape[1],
        1 / logits.temperature,
        logits.softcap or 1.0,
    ]
    return KernelArguments(tensors, numbers, constants)


def statistics(logits: Logits, targets: torch.Tensor, with_dot: bool) -> Statistics:
    """Compute the statistics of each row: some programs share a row's vocabulary, and their parts are merged."""
    tensors, numbers, constants = kernel_arguments(
        logits, gradient=False, sm=_compute_capability(targets.device)
    )
    num_rows, num_columns = logits.shape
    row_blocks = triton.cdiv(num_rows, constants["BLOCK_M"])
    tiles = triton.cdiv(num_columns, constants["BLOCK_N"])
    # Enough splits of the vocabulary for four programs on each multiprocessor.
    wanted_splits = max(
        1, triton.cdiv(4 * _num_multiprocessors(targets.device), max(row_blocks, 1))
    )
    tiles_per_split = triton.cdiv(max(tiles, 1), wanted_splits)
    splits = max(1, triton.cdiv(tiles, tiles_per_split))
    out = torch.empty(4, splits, num_rows, dtype=torch.float32, device=targets.device)
    if num_rows:
        statistics_kernel[(row_blocks * splits,)](
            *tensors,
            targets,
            out,
            *numbers,
            splits,
            tiles_per_split,
            WITH_DOT=with_dot,
            **constants,
        )
    return Statistics(*out).merge_parts()


def add_gradients(gradients: Gradients, logits: Logits, logit_gradient: LogitGradient) -> None:
    num_rows, num_columns = logits.shape
    width = 1024 * max(1, STRIP_ELEMENTS // (1024 * max(1, num_rows)))
    input = logits.terms[0].input
    sm = _compute_capability(input.device)
    scratch = input.new_empty(num_rows * min(width, num_columns))

    def tile_gradient(tile: Logits, gradient: LogitGradient) -> torch.Tensor:
        tensors, numbers, constants = kernel_arguments(tile, gradient=True, sm=sm)
        rows, columns = tile.shape
        out = scratch[: rows * columns].view(rows, columns)
        grid = (
            triton.cdiv(rows, constants["BLOCK_M"]) * triton.cdiv(columns, constants["BLOCK_N"]),
        )
        has_entropy = gradient.entropy_coef is not None
        entropy_coef = (
            gradient.entropy_coef if has_entropy else gradient.softmax_coef
        )  # any tensor: it is not read
        gradient_kernel[grid](
            *tensors, gradient.targets, gradient.logsumexp, gradient.onehot_coef, gradient.softmax_coef, entropy_coef,
            out, *numbers, HAS_ENTROPY=has_entropy, **constants,
        )  # fmt: skip
        return out

    accumulate(gradients, logits, logit_gradient, Tiling(max(num_rows, 1), width), tile_gradient)


def _num_multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1  # Triton's interpreter


def _compute_capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor
