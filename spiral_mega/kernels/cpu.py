"""Tiles by torch's own matrix products, small enough that what is done to each logit finds it in the cache."""

from __future__ import annotations

import torch

from spiral_mega.kernels.gradients import Gradients, Tiling, accumulate
from spiral_mega.kernels.logits import Logits, Statistics, Upstream, accumulator

TILE_ELEMENTS = 2**21  # 8 MiB in float32: two fit in a last-level cache, and products of this size run at full speed
TILE_ROWS = 4096
KEPT_ELEMENTS = 2**24  # of logits: up to here, 64 MiB, they are kept for the backward pass and not multiplied again
LOG_OF_ZERO = -1000.0  # exp of it is 0 in any type; unlike -inf, 0 times it is 0


def tiling(rows: int) -> Tiling:
    """Few rows leave room for more of the vocabulary."""
    return Tiling(TILE_ROWS, max(1, TILE_ELEMENTS // max(1, min(rows, TILE_ROWS))))


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which products are taken: half precision only where the processor has instructions for it."""
    native = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype if native or dtype == torch.float64 else torch.float32


class _Scratch:
    """Memory for one tile's logits, used again for every tile: fresh pages would cost as much as the arithmetic."""

    def __init__(self, logits: Logits, tiling: Tiling) -> None:
        rows, columns = logits.shape
        size = min(rows, tiling.rows) * min(columns, tiling.columns)
        input = logits.terms[0].input
        wide = accumulator(input.dtype)
        self._wide = [input.new_empty(size, dtype=wide) for _ in range(2)]
        self._narrow = input.new_empty(size) if input.dtype != wide else None

    def computed(self, tile: Logits) -> torch.Tensor:
        """The tile's logits [t, v], in the memory that keeps them if there is some."""
        rows, columns = tile.shape
        values = self.buffers(tile)[0] if tile.kept is None else tile.kept
        (x, w), *others = tile.terms
        if self._narrow is None:
            torch.mm(x, w.T, out=values)
        else:
            values.copy_(torch.mm(x, w.T, out=self._narrow[: rows * columns].view(rows, columns)))
        for x, w in others:
            values += x @ w.T
        if tile.bias is not None:
            values += tile.bias
        if tile.softcap is not None:
            values.div_(tile.softcap).tanh_().mul_(tile.softcap)
        if tile.temperature != 1.0:
            values.div_(tile.temperature)
        return values

    def buffers(self, tile: Logits) -> tuple[torch.Tensor, torch.Tensor]:
        """Two of the tile's form. Logits that nothing keeps are in the first."""
        rows, columns = tile.shape
        first, second = (buffer[: rows * columns].view(rows, columns) for buffer in self._wide)
        return first, second

    def narrowed(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._narrow is None else self._narrow[: values.numel()].view(values.shape).copy_(values)


def statistics(logits: Logits, targets: torch.Tensor, with_dot: bool) -> Statistics:
    """One pass over the logits, with a running maximum."""
    (num_rows, num_columns), input = logits.shape, logits.terms[0].input
    tiles = tiling(num_rows)
    scratch = _Scratch(logits, tiles)
    wide = accumulator(input.dtype)
    result = Statistics(
        input.new_full((num_rows,), torch.finfo(wide).min, dtype=wide),
        input.new_zeros(num_rows, dtype=wide),
        input.new_zeros(num_rows, dtype=wide),
        input.new_full((num_rows,), -torch.inf, dtype=wide),
    )
    for columns in tiles.over_columns(num_columns):
        strip = logits.columns(columns)
        for rows in tiles.over_rows(num_rows):
            tile = strip.rows(rows)
            values, (shifted, exponentials) = scratch.computed(tile), scratch.buffers(tile)
            so_far = Statistics(*(each[rows] for each in result))
            held, index = _held(targets[rows] - columns.start, values)
            so_far.target[held] = values[held, index]
            maximum = torch.maximum(so_far.max, values.amax(1))
            _, total, dot, _ = so_far.relative_to(maximum)
            torch.sub(values, maximum[:, None], out=shifted)
            torch.exp(shifted, out=exponentials)
            so_far.sum.copy_(total + exponentials.sum(1))
            if with_dot:
                # A token of probability 0 adds nothing; as 0 * -inf it would add NaN, which the sum leaves out.
                so_far.dot.copy_(dot + exponentials.mul_(shifted).nansum(1))
            so_far.max.copy_(maximum)
    return result


def add_gradients(gradients: Gradients, logits: Logits, upstream: Upstream) -> None:
    tiles = tiling(logits.shape[0])
    scratch = _Scratch(logits, tiles)

    def tile_gradient(tile: Logits, upstream: Upstream) -> torch.Tensor:
        values, (shifted, other) = tile.kept, scratch.buffers(tile)
        if values is None:
            values = scratch.computed(tile)
        slope = None if tile.softcap is None else 1 - (values * (tile.temperature / tile.softcap)).square_()
        torch.sub(values, upstream.logsumexp[:, None], out=shifted)
        if upstream.of_entropy is None:
            gradient = shifted.exp_().mul_(upstream.of_softmax[:, None])
        else:
            torch.exp(shifted, out=other)
            shifted.clamp_(min=LOG_OF_ZERO).mul_(-upstream.of_entropy[:, None])
            gradient = shifted.add_(upstream.of_softmax[:, None]).mul_(other)
        held, index = _held(upstream.targets, gradient)
        gradient[held, index] += upstream.of_target[held]
        if slope is not None:
            gradient.mul_(slope)
        return scratch.narrowed(gradient)

    accumulate(gradients, logits, upstream, tiles, tile_gradient)


def _held(targets: torch.Tensor, tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows whose target is in the tile, and its column there."""
    (held,) = ((targets >= 0) & (targets < tile.shape[1])).nonzero(as_tuple=True)
    return held, targets[held]
