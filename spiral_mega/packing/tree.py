"""Sequences of one draw merged by their common token prefixes, so that every distinct token stands once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spiral_mega.packing.training_sequence import TrainingSequence

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A forest of T tokens, one tree a draw, laid out depth first.

    The token at row i may see that at row j exactly when j <= i < subtree_end[j]; it is `depth[i]` tokens from the
    start of its sequences. `token_ids`, `depth`, `subtree_end`, `parent` [T] (parent -1: none); `response_nodes` [R]:
    the row of each response token, sequence by sequence in the order given. Identical sequences share one path.
    """

    token_ids: Ints
    depth: Ints
    subtree_end: Ints
    parent: Ints
    response_nodes: Ints

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class SortedTokens(NamedTuple):
    """Token sequences in lexicographic order, where those that share most stand side by side.

    `order`: which of the given sequences each is; `shared`: how many leading tokens it has in common with the one
    before it, 0 for the first. A range of them is a tree of sum(lengths) - sum(shared, without the first) tokens.
    """

    tokens: list[npt.NDArray[np.int32]]
    order: list[int]
    shared: list[int]


class _Run(NamedTuple):
    """Tokens of one path at depths [start, stop), on consecutive rows from `row`."""

    start: int
    stop: int
    row: int

    def rows(self, start: int, stop: int) -> slice:
        """The rows of the depths [start, stop), as far as the run has them."""
        first, last = max(start, self.start), max(min(stop, self.stop), self.start)
        return slice(self.row + first - self.start, self.row + last - self.start)


def sort_tokens(sequences: Seq[TrainingSequence]) -> SortedTokens:
    """Sort by tokens, and by place among equals. Linear in the tokens, but for comparing bytes while sorting."""
    tokens = [np.frombuffer(array("i", s.prompt_ids) + array("i", s.response_ids), dtype=np.int32) for s in sequences]
    keys = [each.astype(">u4").tobytes() for each in tokens]  # most significant byte first: bytes compare as numbers
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    ordered = [tokens[i] for i in order]
    shared = [0, *(_common_prefix(a, b) for a, b in pairwise(ordered))][: len(order)]
    return SortedTokens(ordered, order, shared)


def build_tree(sequences: Seq[TrainingSequence]) -> TokenTree:
    """Merge the sequences of each draw (`key[0]`); draws stay apart, for all that their prompts share is a template.

    Raises ValueError for a sequence without a prompt, whose first response token nothing would predict.
    """
    for s in sequences:
        if not s.prompt_ids:
            raise ValueError(f"sequence {s.key} has an empty prompt")
    members = sorted(range(len(sequences)), key=lambda i: sequences[i].key[0])
    parts = [list(group) for _, group in groupby(members, key=lambda i: sequences[i].key[0])]
    in_order = []
    for part in parts:
        tokens, order, shared = sort_tokens([sequences[i] for i in part])
        in_order += list(zip(tokens, [part[i] for i in order], shared, strict=True))
    return _lay_out(in_order, [len(s.prompt_ids) for s in sequences])


def _lay_out(in_order: list[tuple[npt.NDArray[np.int32], int, int]], prompts: list[int]) -> TokenTree:
    """`in_order`: tokens, index, shared of each sequence, depth first; shared 0 starts a tree."""
    total = sum(len(tokens) - shared for tokens, _, shared in in_order)
    depth, subtree_end = np.empty(total, np.int64), np.empty(total, np.int64)
    parent = np.arange(-1, total - 1)
    path: list[_Run] = []
    nodes: list[Ints] = [np.empty(0, np.int64)] * len(prompts)
    row = 0
    for tokens, index, shared in in_order:
        _leave(path, shared, row, subtree_end)
        if (new := len(tokens) - shared) > 0:
            depth[row : row + new] = np.arange(shared, len(tokens))
            parent[row] = path[-1].rows(shared - 1, shared).start if path else -1
            path.append(_Run(shared, len(tokens), row))
            row += new
        rows = [run.rows(prompts[index], len(tokens)) for run in path]
        nodes[index] = np.concatenate([np.arange(r.start, r.stop) for r in rows])
    _leave(path, 0, row, subtree_end)
    token_ids = [tokens[shared:] for tokens, _, shared in in_order]
    return TokenTree(
        token_ids=np.concatenate([*token_ids, np.empty(0, np.int64)]),
        depth=depth,
        subtree_end=subtree_end,
        parent=parent,
        response_nodes=np.concatenate([*nodes, np.empty(0, np.int64)]),
    )


def _leave(path: list[_Run], depth: int, row: int, subtree_end: Ints) -> None:
    """Cut `path` down to its first `depth` tokens; the subtrees of the others end at `row`."""
    while path and path[-1].stop > depth:
        run = path.pop()
        subtree_end[run.rows(depth, run.stop)] = row
        if run.start < depth:
            path.append(_Run(run.start, depth, run.row))


def _common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
