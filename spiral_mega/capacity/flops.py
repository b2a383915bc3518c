"""FLOPs of training on token trees: products of matrices, two for each multiplication and addition."""

from __future__ import annotations

from dataclasses import dataclass

from spiral_mega.models.dimensions import Sizes


@dataclass(frozen=True, slots=True)
class Work:
    """Of a problem's tree: distinct tokens, those that the head sees, and pairs of tokens that attend."""

    tokens: float
    learnt: float
    pairs: float

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.learnt + other.learnt, self.pairs + other.pairs)


def linear(sizes: Sizes, tokens: float) -> float:
    """The layers' linear maps, forward."""
    return 2.0 * sizes.linear * tokens


def attention(sizes: Sizes, pairs: float) -> float:
    """Scores and weighted sums, forward."""
    return 4.0 * sizes.layers * sizes.heads * sizes.head_dim * pairs


def head(sizes: Sizes, learnt: float) -> float:
    """The head's logits, once."""
    return 2.0 * sizes.vocabulary * sizes.hidden * learnt


def forward(sizes: Sizes, work: Work) -> float:
    """Of the whole model."""
    return linear(sizes, work.tokens) + attention(sizes, work.pairs) + head(sizes, work.learnt)


def training(sizes: Sizes, work: Work, *, frozen: bool, checkpointing: bool) -> float:
    """Forward and backward. With a frozen base no gradients of its weights are computed; checkpointing runs the layers
    forward once more; the head computes its logits twice; attention's backward pass computes scores again."""
    backward = 1 if frozen else 2
    again = 1 if checkpointing else 0
    return (
        (1 + backward + again) * linear(sizes, work.tokens)
        + (1 + 2.5 + again) * attention(sizes, work.pairs)
        + (2 + backward) * head(sizes, work.learnt)
    )
