"""Cut a token tree into parts that fit a micro-batch, and estimate what each part costs.

The sequences of one prompt, sorted by their tokens, are the branches of its tree, and any range of
them is a tree too. Between two branches a cut costs the tokens that both share, which each side
then computes for itself:

    branch       tokens shared with the one before
    a b c d      0
    a b c e f    3     <- a cut here computes 4 + 5 tokens instead of 6
    a g          1     <- a cut here computes 6 + 2 tokens instead of 7
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.packing.tree import sort_tokens

# Attention's cost next to the linear cost of a token: the token at depth d adds 2 d /
# ATTENTION_TOKENS. At hidden size h a layer's linear work is about 24 h^2 flops a token and
# attention's 4 h d, so 12 h. A constant for h near 4096; the balance is insensitive to it.
ATTENTION_TOKENS = 50_000


class Branch(NamedTuple):
    """A sequence in the order of its prompt's tree: its tokens, and how many it shares with the branch before it."""

    key: SequenceKey
    length: int
    shared: int


class TreePart(NamedTuple):
    """Sequences that stay together: their tree's distinct tokens, and its cost in units of a token's linear work."""

    keys: list[SequenceKey]
    tokens: int
    cost: float


def make_branches(sequences: list[TrainingSequence]) -> list[Branch]:
    """Return the sequences of one prompt as the branches of their tree, in its order."""
    ordered = sort_tokens(sequences)
    return [
        Branch(sequences[index].key, len(tokens), shared)
        for tokens, index, shared in zip(ordered.tokens, ordered.order, ordered.shared, strict=True)
    ]


def make_part(branches: Sequence[Branch]) -> TreePart:
    """Measure the tree of consecutive branches; what the first shares with a branch before it counts in full."""
    tokens, pairs = 0, 0
    for index, branch in enumerate(branches):
        start = 0 if index == 0 else branch.shared
        tokens += branch.length - start
        pairs += branch.length * branch.length - start * start
    return TreePart([branch.key for branch in branches], tokens, tokens + pairs / ATTENTION_TOKENS)


def cut_tree(branches: Sequence[Branch], budget: int) -> list[TreePart]:
    """Cut one tree into ranges of branches of at most `budget` distinct tokens each, with the
    fewest tokens in total.

    No branch may be longer than the budget.
    """
    fewest = [0.0] + [float("inf")] * len(branches)  # tokens of the first i branches, cut at best
    last_start = [0] * (len(branches) + 1)  # where the last part of these starts
    for stop in range(1, len(branches) + 1):
        tokens = 0
        for start in range(stop - 1, -1, -1):
            tokens += branches[start].length
            if start + 1 < stop:
                tokens -= branches[start + 1].shared
            if tokens > budget:
                break
            if fewest[start] + tokens < fewest[stop]:
                fewest[stop], last_start[stop] = fewest[start] + tokens, start
    parts = []
    stop = len(branches)
    while stop:
        parts.append(make_part(branches[last_start[stop] : stop]))
        stop = last_start[stop]
    return parts[::-1]
