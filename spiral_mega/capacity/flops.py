"""FLOPs of training on token trees. One multiplication and one addition are two FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from spiral_mega.models.dimensions import ModelSizes


@dataclass(frozen=True, slots=True)
class Work:
    """Size of a token tree: distinct tokens, tokens that reach the head, and (query, key) pairs that attend."""

    tokens: float
    head_tokens: float
    pairs: float

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.head_tokens + other.head_tokens,
            self.pairs + other.pairs,
        )


def linear(sizes: ModelSizes, tokens: float) -> float:
    """Count the forward pass of the layers' linear maps."""
    return 2.0 * sizes.linear_params * tokens


def attention(sizes: ModelSizes, pairs: float) -> float:
    """Count the forward pass of attention: scores and weighted sums."""
    return 4.0 * sizes.layers * sizes.heads * sizes.head_dim * pairs


def head(sizes: ModelSizes, tokens: float) -> float:
    """Count the head's logits, computed once."""
    return 2.0 * sizes.vocabulary * sizes.hidden * tokens


def forward(sizes: ModelSizes, work: Work) -> float:
    """Count the forward pass of the whole model."""
    return linear(sizes, work.tokens) + attention(sizes, work.pairs) + head(sizes, work.head_tokens)


def training(sizes: ModelSizes, work: Work, *, frozen: bool, checkpointing: bool) -> float:
    """Count the forward and backward pass.

    With a frozen base (`frozen`) no weight gradients of the base are computed. Activation
    checkpointing runs the layers' forward pass once more. The head computes its logits twice, and
    the backward pass of attention computes the scores again.
    """
    backward = 1 if frozen else 2
    recompute = 1 if checkpointing else 0
    return (
        (1 + backward + recompute) * linear(sizes, work.tokens)
        + (1 + 2.5 + recompute) * attention(sizes, work.pairs)
        + (2 + backward) * head(sizes, work.head_tokens)
    )
