"""Lay out which rows of a token tree attend to which, as blocks for variable-length attention
kernels.

For the tree of packing/tree.py, whose segments (unbranched runs) are a b, c, d, e and f:

    key           a  b  c  d  e  f
    query    a    0  .  .  .  .  .     0: one causal block for each segment
             b    0  0  .  .  .  .
             c    1  1  0  .  .  .     1: full blocks, descendants against their ancestors; here c against a b,
             d    1  1  1  0  .  .        d e against a b c (the keys a b are copied, which spares a second level),
             e    1  1  1  .  0  .        and f against a b
             f    1  1  .  .  .  0

Every pair of a query and a key that it sees is in one block. With a sliding window each run of
queries has a single causal block, of the gathered keys of its path that the window reaches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from spiral_mega.packing.tree import Ints

Rows = slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of attention between the queries at `rows` (counted among the queries) and the keys at
    `cols`.

    Block b has the queries [bounds_q[b], bounds_q[b + 1]) of `rows` and the keys [bounds_k[b],
    bounds_k[b + 1]) of `cols`. `causal`: the last query of a block sees its last key, the one
    before it all but that, and so on; otherwise every query sees every key. No block is empty.
    `cu_q`, `cu_k`: the bounds as int32 tensors on the device.
    """

    rows: Rows
    cols: Rows
    bounds_q: list[int]
    bounds_k: list[int]
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    causal: bool

    @property
    def max_q(self) -> int:
        return max(stop - start for start, stop in pairwise(self.bounds_q))

    @property
    def max_k(self) -> int:
        return max(stop - start for start, stop in pairwise(self.bounds_k))


class Segment(NamedTuple):
    """A maximal unbranched run of rows [start, stop), whose descendants are the rows [stop, end).

    `path`: the indices of the segments above it, from the root.
    """

    start: int
    stop: int
    end: int
    path: tuple[int, ...]


class _Piece(NamedTuple):
    """Rows, and the keys that those of them see which attend."""

    rows: range
    keys: Sequence[range]


class _Descendants(NamedTuple):
    """Rows that see the keys of the segment `holder`'s block."""

    rows: range
    holder: int


class TreeLayout:
    """The attention of a forest with `depth` and `subtree_end` [T], for tensors on `device`.

    `queries`: the rows that attend, ascending (default: all T); keys and values are those of all T
    rows. Not a dataclass, because FSDP would take one apart and rebuild it at every layer.
    """

    def __init__(
        self,
        depth: Ints,
        subtree_end: Ints,
        device: torch.device | None = None,
        queries: Ints | None = None,
    ) -> None:
        self.depth, self.subtree_end = depth, subtree_end
        self.device = device or torch.device("cpu")
        self.queries = np.arange(len(depth)) if queries is None else queries
        self.segments = find_segments(depth, subtree_end)
        self._blocks: dict[int | None, list[Blocks]] = {}
        self.masks: dict[
            int | None, Any
        ] = {}  # FlexAttention's block masks by window, filled by packing/flex.py

    def to(self, device: torch.device) -> TreeLayout:
        return TreeLayout(self.depth, self.subtree_end, device, self.queries)

    def select_queries(self, queries: Ints) -> TreeLayout:
        """Return the layout where only the rows `queries`, in ascending order, attend, to the same keys."""
        return TreeLayout(self.depth, self.subtree_end, self.device, queries)

    def blocks(self, window: int | None = None) -> list[Blocks]:
        """Return blocks that together hold every pair of a query and a key that it sees once (see
        the module).

        The first has all queries in order. `window`: a token sees only the last `window` tokens of
        its path, itself among them; None: all of it.
        """
        if window is not None and window > int(self.depth.max()):
            window = None
        if window not in self._blocks:
            self._blocks[window] = (
                self._blocks_by_level() if window is None else [self._windowed_block(window)]
            )
        return self._blocks[window]

    def _blocks_by_level(self) -> list[Blocks]:
        """Return a causal block for each run of queries, then one set of full blocks for each level of descendants."""
        own = [_Piece(run, [range(segment.start, run.stop)]) for segment, run in self._query_runs()]
        blocks = [self._make_blocks(own, causal=True)]
        keys, levels = self._descendants_by_level()
        for descendants in levels:
            pieces = [
                _Piece(rows, keys[holder])
                for rows, holder in descendants
                if len(self._query_range(rows))
            ]
            if pieces:
                blocks.append(self._make_blocks(pieces, causal=False))
        return blocks

    def _descendants_by_level(self) -> tuple[dict[int, list[range]], list[list[_Descendants]]]:
        """Return the keys of each segment's block for its descendants, and by level who sees which segment's block."""
        keys: dict[int, list[range]] = {}
        holders: dict[
            int, tuple[int, ...]
        ] = {}  # by segment: the segments whose blocks, one a level, hold its path
        levels: list[list[_Descendants]] = []
        for index, segment in enumerate(self.segments):
            rows = range(segment.start, segment.stop)
            above = holders[segment.path[-1]] if segment.path else ()
            for level, holder in enumerate(above):
                _append_rows(levels[level], rows, holder)
            num_descendants = segment.end - segment.stop
            if num_descendants == 0:
                continue
            # Another level costs a merge of the rows below; copying the keys above into this block
            # costs those keys.
            if above and num_descendants >= _count(keys[above[-1]]):
                keys[index], holders[index] = [*keys[above[-1]], rows], (*above[:-1], index)
            else:
                keys[index], holders[index] = [rows], (*above, index)
            if len(holders[index]) > len(levels):
                levels.append([])
        return keys, levels

    def _windowed_block(self, window: int) -> Blocks:
        """Return one causal block for each run of queries, with the keys of its path that the window reaches."""
        pieces = []
        for segment, run in self._query_runs():
            missing = min(window - 1, int(self.depth[run.start]))
            above: list[range] = []
            path = [range(self.segments[i].start, self.segments[i].stop) for i in segment.path]
            for rows in reversed([*path, range(segment.start, run.start)]):
                start = max(rows.start, rows.stop - missing)
                above.insert(0, range(start, rows.stop))
                missing -= rows.stop - start
            pieces.append(_Piece(run, [*above, run]))
        return self._make_blocks(pieces, causal=True)

    def _query_runs(self) -> Iterator[tuple[Segment, range]]:
        """Yield the queries as runs of consecutive rows, each with the segment that it lies in."""
        breaks = np.flatnonzero(np.diff(self.queries) != 1) + 1
        bounds = [0, *breaks.tolist(), len(self.queries)]
        segment_starts = [segment.start for segment in self.segments]
        for first, last in pairwise(bounds):
            start, stop = int(self.queries[first]), int(self.queries[last - 1]) + 1
            while start < stop:
                segment = self.segments[bisect_right(segment_starts, start) - 1]
                yield segment, range(start, min(segment.stop, stop))
                start = segment.stop

    def _query_range(self, rows: range) -> range:
        """Return the positions among the queries of those of `rows` that attend."""
        first, last = np.searchsorted(self.queries, [rows.start, rows.stop]).tolist()
        return range(first, last)

    def _make_blocks(self, pieces: list[_Piece], *, causal: bool) -> Blocks:
        queries = [self._query_range(piece.rows) for piece in pieces]
        bounds_q = np.cumsum([0, *map(len, queries)])
        bounds_k = np.cumsum([0, *(_count(piece.keys) for piece in pieces)])
        return Blocks(
            rows=self._index(queries),
            cols=self._index(chain.from_iterable(piece.keys for piece in pieces)),
            bounds_q=bounds_q.tolist(),
            bounds_k=bounds_k.tolist(),
            cu_q=torch.from_numpy(bounds_q).to(self.device, torch.int32),
            cu_k=torch.from_numpy(bounds_k).to(self.device, torch.int32),
            causal=causal,
        )

    def _index(self, ranges: Iterable[range]) -> Rows:
        """Index the rows of `ranges`: by a slice, which copies nothing, if they follow one another."""
        ranges = [each for each in ranges if len(each)]
        if all(a.stop == b.start for a, b in pairwise(ranges)):
            return slice(ranges[0].start, ranges[-1].stop)
        rows = np.concatenate([np.arange(each.start, each.stop) for each in ranges])
        return torch.from_numpy(rows).to(self.device)


def _count(ranges: Sequence[range]) -> int:
    return sum(map(len, ranges))


def _append_rows(level: list[_Descendants], rows: range, holder: int) -> None:
    """Append rows that see `holder`'s keys, to the last entry if they continue it."""
    if level and level[-1].holder == holder and level[-1].rows.stop == rows.start:
        rows = range(level.pop().rows.start, rows.stop)
    level.append(_Descendants(rows, holder))


def find_segments(depth: Ints, subtree_end: Ints) -> list[Segment]:
    """Return every maximal unbranched run, in order."""
    follows = (depth[1:] == depth[:-1] + 1) & (subtree_end[1:] == subtree_end[:-1])
    starts = np.concatenate([[0], np.flatnonzero(~follows) + 1]).tolist()
    segments: list[Segment] = []
    path: list[int] = []
    for start, stop in zip(starts, [*starts[1:], len(depth)], strict=True):
        while path and segments[path[-1]].end <= start:
            path.pop()
        segments.append(Segment(start, stop, int(subtree_end[start]), tuple(path)))
        path.append(len(segments) - 1)
    return segments
