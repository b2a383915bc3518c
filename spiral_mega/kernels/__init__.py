"""Kernels for what plain torch would do with too much memory or time: log-probs from hidden states,
without logits.

Suffixes of tensor names give their dimensions, in order:

    T   tokens: rows of the logits                t   tokens of a tile
    V   entries of the vocabulary, or of a shard  v   entries of a tile
    H   hidden features                           S   parts of the vocabulary
    K   features of a product, H or R             R   rank of the adapter
"""

from spiral_mega.kernels.dispatch import linear_logprob
from spiral_mega.kernels.logits import LinearLogprob

__all__ = ["LinearLogprob", "linear_logprob"]
