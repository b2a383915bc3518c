"""Merge the sequences of each prompt by common token prefixes, so that each distinct token is
computed once.

    sequences         tree                    laid out depth first

    a b | c d         a - b - c - d           row          0  1  2  3  4  5
    a b | c e               |   ` e           token        a  b  c  d  e  f
    a b | f                 ` f               depth        0  1  2  3  3  2
                                              subtree_end  6  6  5  4  5  6
                                              parent      -1  0  1  2  2  1

Row i attends to row j exactly when j <= i < subtree_end[j], that is when j is on the path from the
root to i.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spiral_mega.packing.training_sequence import TrainingSequence

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A forest of T tokens, one tree for each prompt index, laid out depth first (see the module's
    picture).

    `token_ids`, `depth` (tokens before it in its sequences), `subtree_end` and `parent` (-1: none)
    are [T]. `response_nodes` [R]: the row of each response token, sequence by sequence in the order
    given. Identical sequences share one path.
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
    """Token sequences in lexicographic order, where those that share most are neighbours.

    `order`: which of the given sequences each is; `shared`: how many leading tokens it has in
    common with the one before it, 0 for the first. A range of them is a tree of sum(lengths) -
    sum(shared, without the first) tokens.
    """

    tokens: list[Tokens]
    order: list[int]
    shared: list[int]


class _Branch(NamedTuple):
    """A sequence to lay out: its tokens, its place among those given, and how many tokens it shares with the last."""

    tokens: Tokens
    place: int
    shared: int


class _Run(NamedTuple):
    """Tokens of one path at depths [start, stop), on consecutive rows from `row`."""

    start: int
    stop: int
    row: int

    def rows(self, start: int, stop: int) -> range:
        """Return the rows of the depths [start, stop), as far as the run has them."""
        first, last = max(start, self.start), max(min(stop, self.stop), self.start)
        return range(self.row + first - self.start, self.row + last - self.start)


def sort_tokens(sequences: Sequence[TrainingSequence]) -> SortedTokens:
    """Sort by tokens, and by position among equals. Linear in the tokens, except for comparing bytes while sorting."""
    tokens = [
        np.frombuffer(array("i", s.prompt_ids) + array("i", s.response_ids), dtype=np.int32)
        for s in sequences
    ]
    keys = [
        each.astype(">u4").tobytes() for each in tokens
    ]  # most significant byte first: bytes compare as numbers
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    ordered = [tokens[i] for i in order]
    shared = [0, *(_common_prefix(a, b) for a, b in pairwise(ordered))][: len(order)]
    return SortedTokens(ordered, order, shared)


def build_tree(sequences: Sequence[TrainingSequence]) -> TokenTree:
    """Merge the sequences of each prompt index; those of different ones stay apart, even if they
    share a template.

    Raises ValueError for a sequence without a prompt, whose first response token nothing would
    predict.
    """
    for sequence in sequences:
        if not sequence.prompt_ids:
            raise ValueError(f"sequence {tuple(sequence.key)} has an empty prompt")

    def prompt_index(index: int) -> int:
        return sequences[index].key.prompt_index

    branches: list[_Branch] = []
    for _, group in groupby(sorted(range(len(sequences)), key=prompt_index), key=prompt_index):
        members = list(group)
        ordered = sort_tokens([sequences[i] for i in members])
        for tokens, member, shared in zip(
            ordered.tokens, ordered.order, ordered.shared, strict=True
        ):
            branches.append(_Branch(tokens, members[member], shared))
    return _lay_out(branches, [len(sequence.prompt_ids) for sequence in sequences])


def _lay_out(branches: Sequence[_Branch], prompt_lengths: Sequence[int]) -> TokenTree:
    """Lay out the sequences depth first; one that shares no token starts a tree."""
    total = sum(len(branch.tokens) - branch.shared for branch in branches)
    depth, subtree_end = np.empty(total, np.int64), np.empty(total, np.int64)
    parent = np.arange(-1, total - 1)
    path: list[_Run] = []
    nodes: list[Ints] = [np.empty(0, np.int64)] * len(prompt_lengths)
    row = 0
    for tokens, place, shared in branches:
        _leave_path(path, shared, row, subtree_end)
        num_new = len(tokens) - shared
        if num_new > 0:
            depth[row : row + num_new] = np.arange(shared, len(tokens))
            parent[row] = path[-1].rows(shared - 1, shared).start if path else -1
            path.append(_Run(shared, len(tokens), row))
            row += num_new
        nodes[place] = _path_rows(path, prompt_lengths[place], len(tokens))
    _leave_path(path, 0, row, subtree_end)
    token_ids = [branch.tokens[branch.shared :] for branch in branches]
    return TokenTree(
        token_ids=np.concatenate([*token_ids, np.empty(0, np.int64)]),
        depth=depth,
        subtree_end=subtree_end,
        parent=parent,
        response_nodes=np.concatenate([*nodes, np.empty(0, np.int64)]),
    )


def _path_rows(path: Sequence[_Run], start: int, stop: int) -> Ints:
    """Return the rows of the path's depths [start, stop)."""
    rows = [run.rows(start, stop) for run in path]
    return np.concatenate([np.arange(each.start, each.stop) for each in rows])


def _leave_path(path: list[_Run], depth: int, row: int, subtree_end: Ints) -> None:
    """Shorten `path` to its first `depth` tokens; the subtrees of the others end at `row`."""
    while path and path[-1].stop > depth:
        run = path.pop()
        left = run.rows(depth, run.stop)
        subtree_end[left.start : left.stop] = row
        if run.start < depth:
            path.append(_Run(run.start, depth, run.row))


def _common_prefix(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
