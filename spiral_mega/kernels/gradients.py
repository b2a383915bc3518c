"""The backward pass that all devices share: the gradient of one tile of logits at a time, and its products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from spiral_mega.kernels.logits import Logits, Upstream, accumulator

# The gradient of a tile of logits [t, v], in the type of the inputs, before softcap and temperature.
TileGradient = Callable[[Logits, Upstream], torch.Tensor]


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
    """Of the terms' inputs [T, K] and weights [V, K], and of the bias [V]; None where not asked for."""

    inputs: list[torch.Tensor | None]
    weights: list[torch.Tensor | None]
    bias: torch.Tensor | None


def allocate(logits: Logits, inputs: list[bool], weights: list[bool], bias: bool) -> Gradients:
    """Room for what is asked for. Those of inputs are sums over the vocabulary's tiles, so they are kept wide."""
    wide = accumulator(logits.terms[0].input.dtype)
    return Gradients(
        [torch.zeros_like(x, dtype=wide) if w else None for (x, _), w in zip(logits.terms, inputs, strict=True)],
        [torch.zeros_like(x) if w else None for (_, x), w in zip(logits.terms, weights, strict=True)],
        torch.zeros_like(logits.bias) if bias and logits.bias is not None else None,
    )


def accumulate(
    gradients: Gradients, logits: Logits, upstream: Upstream, tiling: Tiling, tile_gradient: TileGradient
) -> None:
    """Fill `gradients`. Vocabulary outside, tokens inside: a weight's tile is read once and its gradient written once.

    Sums run in a fixed order, so the same input gives the same bits.
    """
    num_rows, num_columns = logits.shape
    wide = accumulator(logits.terms[0].input.dtype)
    one_block = num_rows <= tiling.rows
    for columns in tiling.over_columns(num_columns):
        strip, strip_upstream = logits.columns(columns), upstream.columns(columns)
        # A sum over several blocks of tokens is rounded to the weight's type once, at its end.
        totals = [
            None if w is None else w[columns] if one_block else torch.zeros_like(w[columns], dtype=wide)
            for w in gradients.weights
        ]
        bias_total = None if gradients.bias is None else torch.zeros_like(gradients.bias[columns], dtype=wide)
        for rows in tiling.over_rows(num_rows):
            tile = strip.rows(rows)
            gradient_TV = tile_gradient(tile, strip_upstream.rows(rows))
            for (x, w), of_input, of_weight in zip(tile.terms, gradients.inputs, totals, strict=True):
                if of_input is not None:
                    _add_product(of_input[rows], gradient_TV, w)
                if of_weight is not None:
                    _add_product(of_weight, gradient_TV.T, x)
            if bias_total is not None:
                bias_total += gradient_TV.sum(0, dtype=wide)
        for of_weight, total in zip(gradients.weights, totals, strict=True):
            if of_weight is not None and total is not None and not one_block:
                of_weight[columns] = total
        if gradients.bias is not None and bias_total is not None:
            gradients.bias[columns] = bias_total


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
