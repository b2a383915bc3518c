"""Tiles of logits on CPU: torch's matrix products, on tiles small enough to stay in the cache for what follows."""

from __future__ import annotations

import torch

from spiral_mega.kernels.gradients import Gradients, Tiling, accumulate
from spiral_mega.kernels.logits import LogitGradient, Logits, Statistics, accumulator_dtype

TILE_ELEMENTS = (
    2**21
)  # 8 MiB in float32: two fit in a last-level cache, and products of this size run at full speed
TILE_ROWS = 4096
MAX_SAVED_LOGITS = (
    2**24
)  # up to so many, 64 MiB, are saved for the backward pass and not computed again
LOG_OF_ZERO = -1000.0  # its exp is 0 in any dtype, and unlike with -inf, 0 times it is 0


def make_tiling(rows: int) -> Tiling:
    """Choose the tiles: few rows leave room for more of the vocabulary."""
    return Tiling(TILE_ROWS, max(1, TILE_ELEMENTS // max(1, min(rows, TILE_ROWS))))


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products are taken: half precision only if the processor has instructions for it."""
    native = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype if native or dtype == torch.float64 else torch.float32


class _Scratch:
    """Memory for one tile's logits, reused for every tile: fresh pages would cost as much as the arithmetic."""

    def __init__(self, logits: Logits, tiling: Tiling) -> None:
        rows, columns = logits.shape
        size = min(rows, tiling.rows) * min(columns, tiling.columns)
        input = logits.terms[0].input
        wide = accumulator_dtype(input.dtype)
        self._wide = [input.new_empty(size, dtype=wide) for _ in range(2)]
        self._narrow = input.new_empty(size) if input.dtype != wide else None

    def compute(self, tile: Logits) -> torch.Tensor:
        """Compute the tile's logits [t, v], in the memory where they are saved if there is any."""
        rows, columns = tile.shape
        logits_tv = self.buffers(tile)[0] if tile.saved is None else tile.saved
        (input_tK, weight_vK), *others = tile.terms
        if self._narrow is None:
            torch.mm(input_tK, weight_vK.T, out=logits_tv)
        else:
            narrow_tv = self._narrow[: rows * columns].view(rows, columns)
            logits_tv.copy_(torch.mm(input_tK, weight_vK.T, out=narrow_tv))
        for input_tK, weight_vK in others:
            logits_tv += input_tK @ weight_vK.T
        if tile.bias is not None:
            logits_tv += tile.bias
        if tile.softcap is not None:
            logits_tv.div_(tile.softcap).tanh_().mul_(tile.softcap)
        if tile.temperature != 1.0:
            logits_tv.div_(tile.temperature)
        return logits_tv

    def buffers(self, tile: Logits) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two buffers [t, v]. Logits that are not saved are in the first."""
        rows, columns = tile.shape
        first, second = (buffer[: rows * columns].view(rows, columns) for buffer in self._wide)
        return first, second

    def narrow(self, values_tv: torch.Tensor) -> torch.Tensor:
        """Cast to the dtype of the inputs."""
        if self._narrow is None:
            return values_tv
        return self._narrow[: values_tv.numel()].view(values_tv.shape).copy_(values_tv)


def statistics(logits: Logits, targets: torch.Tensor, with_dot: bool) -> Statistics:
    """Compute the statistics of each row in one pass over the logits, with a running maximum."""
    num_rows, num_columns = logits.shape
    tiling = make_tiling(num_rows)
    scratch = _Scratch(logits, tiling)
    result = _initial_statistics(logits)
    for columns in tiling.over_columns(num_columns):
        strip = logits.columns(columns)
        for rows in tiling.over_rows(num_rows):
            running = Statistics(*(each[rows] for each in result))
            _update(running, scratch, strip.rows(rows), targets[rows] - columns.start, with_dot)
    return result


def _initial_statistics(logits: Logits) -> Statistics:
    input = logits.terms[0].input
    num_rows, wide = len(input), accumulator_dtype(input.dtype)
    return Statistics(
        max=input.new_full((num_rows,), torch.finfo(wide).min, dtype=wide),
        sum=input.new_zeros(num_rows, dtype=wide),
        dot=input.new_zeros(num_rows, dtype=wide),
        target=input.new_full((num_rows,), -torch.inf, dtype=wide),
    )


def _update(
    running: Statistics, scratch: _Scratch, tile: Logits, targets: torch.Tensor, with_dot: bool
) -> None:
    """Update the `running` statistics of a tile's rows in place; `targets` count from the tile's first column."""
    logits_tv, (shifted_tv, exponentials_tv) = scratch.compute(tile), scratch.buffers(tile)
    rows, columns = _targets_in_tile(targets, logits_tv)
    running.target[rows] = logits_tv[rows, columns]
    maximum = torch.maximum(running.max, logits_tv.amax(1))
    _, total, dot, _ = running.relative_to(maximum)
    torch.sub(logits_tv, maximum[:, None], out=shifted_tv)
    torch.exp(shifted_tv, out=exponentials_tv)
    running.sum.copy_(total + exponentials_tv.sum(1))
    if with_dot:
        # A token of probability 0 adds nothing; as 0 * -inf it would add NaN, which the sum leaves
        # out.
        running.dot.copy_(dot + exponentials_tv.mul_(shifted_tv).nansum(1))
    running.max.copy_(maximum)


def add_gradients(gradients: Gradients, logits: Logits, logit_gradient: LogitGradient) -> None:
    tiling = make_tiling(logits.shape[0])
    scratch = _Scratch(logits, tiling)

    def tile_gradient(tile: Logits, gradient: LogitGradient) -> torch.Tensor:
        logits_tv = scratch.compute(tile) if tile.saved is None else tile.saved
        slope_tv = None
        if tile.softcap is not None:
            slope_tv = 1 - (logits_tv * (tile.temperature / tile.softcap)).square_()
        gradient_tv = _softmax_gradient(logits_tv, *scratch.buffers(tile), gradient)
        rows, columns = _targets_in_tile(gradient.targets, gradient_tv)
        gradient_tv[rows, columns] += gradient.onehot_coef[rows]
        if slope_tv is not None:
            gradient_tv.mul_(slope_tv)
        return scratch.narrow(gradient_tv)

    accumulate(gradients, logits, logit_gradient, tiling, tile_gradient)


def _softmax_gradient(
    logits_tv: torch.Tensor, out_tv: torch.Tensor, other_tv: torch.Tensor, gradient: LogitGradient
) -> torch.Tensor:
    """Compute p * (softmax_coef - entropy_coef * log p) in `out_tv`, which may be the memory of the logits."""
    logprobs_tv = torch.sub(logits_tv, gradient.logsumexp[:, None], out=out_tv)
    if gradient.entropy_coef is None:
        return logprobs_tv.exp_().mul_(gradient.softmax_coef[:, None])
    torch.exp(logprobs_tv, out=other_tv)
    logprobs_tv.clamp_(min=LOG_OF_ZERO).mul_(-gradient.entropy_coef[:, None])
    return logprobs_tv.add_(gradient.softmax_coef[:, None]).mul_(other_tv)


def _targets_in_tile(
    targets: torch.Tensor, tile_tv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows whose target is in the tile, and its column there."""
    (rows,) = ((targets >= 0) & (targets < tile_tv.shape[1])).nonzero(as_tuple=True)
    return rows, targets[rows]
