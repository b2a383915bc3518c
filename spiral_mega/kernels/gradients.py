"""The backward pass that all devices share: the gradient of one tile of logits at a time, and its
two products.

for each strip of the vocabulary            weight [v, K] is read, and its gradient written, once
    for each block of tokens                dx [t, v] of the tile, from the device's kernel
        input gradient  [t, K] += dx @ weight
        weight gradient [v, K] += dx^T @ input
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from spiral_mega.kernels.logits import LogitGradient, Logits, accumulator_dtype

# Computes the gradient [t, v] of a tile's logits before softcap and temperature, in the dtype of
# the inputs.
TileGradient = Callable[[Logits, LogitGradient], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of at most `rows` tokens by `columns` vocabulary entries."""

    rows: int
    columns: int

    def over_rows(self, count: int) -> Iterator[slice]:
        return _slices(count, self.rows)

    def over_columns(self, count: int) -> Iterator[slice]:
        return _slices(count, self.columns)


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


@dataclass(slots=True)
class Gradients:
    """Gradients of the terms' inputs [T, K] and weights [V, K], and of the bias [V]; None where not needed."""

    inputs: list[torch.Tensor | None]
    weights: list[torch.Tensor | None]
    bias: torch.Tensor | None


def allocate(logits: Logits, inputs: list[bool], weights: list[bool], bias: bool) -> Gradients:
    """Allocate the gradients that are needed; those of inputs are sums over strips, in the accumulators' dtype."""
    wide = accumulator_dtype(logits.terms[0].input.dtype)
    gradients = Gradients(
        [], [], torch.zeros_like(logits.bias) if bias and logits.bias is not None else None
    )
    for (input_TK, weight_VK), input_needed, weight_needed in zip(
        logits.terms, inputs, weights, strict=True
    ):
        gradients.inputs.append(torch.zeros_like(input_TK, dtype=wide) if input_needed else None)
        gradients.weights.append(torch.zeros_like(weight_VK) if weight_needed else None)
    return gradients


def accumulate(
    gradients: Gradients,
    logits: Logits,
    logit_gradient: LogitGradient,
    tiling: Tiling,
    tile_gradient: TileGradient,
) -> None:
    """Fill `gradients`. Sums run in a fixed order, so the same input gives the same bits."""
    num_rows, num_columns = logits.shape
    one_block = num_rows <= tiling.rows
    for columns in tiling.over_columns(num_columns):
        strip, strip_gradient = logits.columns(columns), logit_gradient.columns(columns)
        strip_sums = _StripSums(
            gradients, columns, accumulator_dtype(logits.terms[0].input.dtype), one_block
        )
        for rows in tiling.over_rows(num_rows):
            tile = strip.rows(rows)
            strip_sums.add(tile, rows, tile_gradient(tile, strip_gradient.rows(rows)))
        strip_sums.write()


class _StripSums:
    """The gradients of one strip of weights and bias, summed over blocks of tokens.

    A sum over several blocks is in the accumulators' dtype and rounded to the weight's once, at its
    end.
    """

    def __init__(
        self, gradients: Gradients, columns: slice, wide: torch.dtype, one_block: bool
    ) -> None:
        self.gradients, self.columns, self.wide, self.one_block = (
            gradients,
            columns,
            wide,
            one_block,
        )
        self.weights = [
            None if weight is None else self._sum_of(weight) for weight in gradients.weights
        ]
        self.bias = (
            None
            if gradients.bias is None
            else torch.zeros_like(gradients.bias[columns], dtype=wide)
        )

    def _sum_of(self, weight: torch.Tensor) -> torch.Tensor:
        strip = weight[self.columns]
        return strip if self.one_block else torch.zeros_like(strip, dtype=self.wide)

    def add(self, tile: Logits, rows: slice, gradient_tv: torch.Tensor) -> None:
        """Add the products of one tile's gradient to the inputs' gradients and to this strip's sums."""
        for (input_tK, weight_vK), input_sum, weight_sum in zip(
            tile.terms, self.gradients.inputs, self.weights, strict=True
        ):
            if input_sum is not None:
                _add_product(input_sum[rows], gradient_tv, weight_vK)
            if weight_sum is not None:
                _add_product(weight_sum, gradient_tv.T, input_tK)
        if self.bias is not None:
            self.bias += gradient_tv.sum(0, dtype=self.wide)

    def write(self) -> None:
        for weight, total in zip(self.gradients.weights, self.weights, strict=True):
            if weight is not None and total is not None and not self.one_block:
                weight[self.columns] = total
        if self.gradients.bias is not None and self.bias is not None:
            self.gradients.bias[self.columns] = self.bias


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
