"""Kernels: what plain torch would do with too much memory or time."""

from spiral_mega.kernels.dispatch import linear_logprob
from spiral_mega.kernels.logits import LinearLogprob

__all__ = ["LinearLogprob", "linear_logprob"]
