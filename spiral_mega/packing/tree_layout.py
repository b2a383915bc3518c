"""Which rows of a token tree attend to which, as blocks that variable-length attention kernels take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from spiral_mega.packing.tree import Ints

Rows = slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of attention: the queries at `rows` (counted among the queries), of which block b has [bounds_q[b],
    bounds_q[b + 1]), against the keys at `cols`, of which it has [bounds_k[b], bounds_k[b + 1]).

    `causal`: the last query of a block sees its last key, the one before it all but that, and so on; else every query
    sees every key. No block is empty. `cu_q`, `cu_k`: the bounds as int32 tensors on the device.
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
        return max(b - a for a, b in pairwise(self.bounds_q))

    @property
    def max_k(self) -> int:
        return max(b - a for a, b in pairwise(self.bounds_k))


class Segment(NamedTuple):
    """A maximal unbranched run of rows [start, stop); its descendants are the rows [stop, end). `level`: segments
    above it; `path`: their indices, from the root."""

    start: int
    stop: int
    end: int
    path: tuple[int, ...]


class TreeLayout:
    """The attention of a forest with `depth` and `subtree_end` [T], for tensors on `device`.

    `queries`: the rows that attend, ascending; keys and values are those of all T rows. None: all attend.
    Not a dataclass: FSDP would take one apart and build it anew at every layer.
    """

    def __init__(
        self, depth: Ints, subtree_end: Ints, device: torch.device | None = None, queries: Ints | None = None
    ) -> None:
        self.depth, self.subtree_end = depth, subtree_end
        self.device = device or torch.device("cpu")
        self.queries = np.arange(len(depth)) if queries is None else queries
        self.segments = find_segments(depth, subtree_end)
        self._blocks: dict[int | None, list[Blocks]] = {}
        self.masks: dict[int | None, Any] = {}  # FlexAttention's block masks by window, made where they are used

    def to(self, device: torch.device) -> TreeLayout:
        return TreeLayout(self.depth, self.subtree_end, device, self.queries)

    def asked_by(self, queries: Ints) -> TreeLayout:
        """The same keys for some of the rows only, which are given in ascending order."""
        return TreeLayout(self.depth, self.subtree_end, self.device, queries)

    def blocks(self, window: int | None = None) -> list[Blocks]:
        """Blocks that together hold every pair of a query and a key that it sees once. The first has all queries in
        order.

        Without `window`: each segment against itself, then level by level, descendants against the segment, and
        against those above it where that spares a level. A token that sees only the `window` last of its path, itself
        among them, has them in one block of gathered keys.
        """
        if window is not None and window > int(self.depth.max()):
            window = None
        if window not in self._blocks:
            self._blocks[window] = self._by_level() if window is None else [self._by_path(window)]
        return self._blocks[window]

    def _by_level(self) -> list[Blocks]:
        own = [range(s.start, s.stop) for s in self.segments]
        # Of each segment with descendants: the keys that its block has for them, and by level, which segments' blocks
        # hold its path.
        keys: dict[int, list[range]] = {}
        holders: dict[int, tuple[int, ...]] = {}
        levels: list[list[tuple[range, int]]] = []  # of each, the rows and whose keys they see
        for i, segment in enumerate(self.segments):
            above = holders[segment.path[-1]] if segment.path else ()
            for level, holder in enumerate(above):
                _append(levels[level], own[i], holder)
            if segment.end == segment.stop:
                continue
            # A level more costs a merge of the rows below; a copy of the keys above into this block, those keys.
            if above and segment.end - segment.stop >= sum(map(len, keys[above[-1]])):
                keys[i], holders[i] = [*keys[above[-1]], own[i]], (*above[:-1], i)
            else:
                keys[i], holders[i] = [own[i]], (*above, i)
            if len(holders[i]) > len(levels):
                levels.append([])
        blocks = [self._make([(run, [range(s.start, run.stop)]) for s, run in self._runs()], causal=True)]
        for pieces in levels:
            if asking := [(rows, keys[holder]) for rows, holder in pieces if len(self._places(rows))]:
                blocks.append(self._make(asking, causal=False))
        return blocks

    def _by_path(self, window: int) -> Blocks:
        pieces = []
        for segment, run in self._runs():
            missing = min(window - 1, int(self.depth[run.start]))
            above: list[range] = []
            path = [range(self.segments[i].start, self.segments[i].stop) for i in segment.path]
            for rows in reversed([*path, range(segment.start, run.start)]):
                start = max(rows.start, rows.stop - missing)
                above.insert(0, range(start, rows.stop))
                missing -= rows.stop - start
            pieces.append((run, [*above, run]))
        return self._make(pieces, causal=True)

    def _runs(self) -> Iterator[tuple[Segment, range]]:
        """The queries as runs of consecutive rows, each with the segment that it lies in."""
        breaks = np.flatnonzero(np.diff(self.queries) != 1) + 1
        bounds = [0, *breaks.tolist(), len(self.queries)]
        starts = [s.start for s in self.segments]
        for first, last in pairwise(bounds):
            start, stop = int(self.queries[first]), int(self.queries[last - 1]) + 1
            while start < stop:
                segment = self.segments[bisect_right(starts, start) - 1]
                yield segment, range(start, min(segment.stop, stop))
                start = segment.stop

    def _places(self, rows: range) -> range:
        """Where those of the rows that attend stand among the queries."""
        first, last = np.searchsorted(self.queries, [rows.start, rows.stop]).tolist()
        return range(first, last)

    def _make(self, pieces: list[tuple[range, list[range]]], *, causal: bool) -> Blocks:
        """Blocks from rows and the keys that those of them see which attend."""
        rows, cols = [self._places(rows) for rows, _ in pieces], [keys for _, keys in pieces]
        bounds_q = np.cumsum([0, *map(len, rows)])
        bounds_k = np.cumsum([0, *(sum(map(len, each)) for each in cols)])
        return Blocks(
            rows=self._index(rows),
            cols=self._index([r for each in cols for r in each]),
            bounds_q=bounds_q.tolist(),
            bounds_k=bounds_k.tolist(),
            cu_q=torch.from_numpy(bounds_q).to(self.device, torch.int32),
            cu_k=torch.from_numpy(bounds_k).to(self.device, torch.int32),
            causal=causal,
        )

    def _index(self, ranges: list[range]) -> Rows:
        """A slice where the ranges follow one another, so that nothing is copied."""
        ranges = [r for r in ranges if len(r)]
        if all(a.stop == b.start for a, b in pairwise(ranges)):
            return slice(ranges[0].start, ranges[-1].stop)
        return torch.from_numpy(np.concatenate([np.arange(r.start, r.stop) for r in ranges])).to(self.device)


def _append(pieces: list[tuple[range, int]], rows: range, holder: int) -> None:
    """Add rows that see `holder`'s keys, to the last piece where they go on from it."""
    if pieces and pieces[-1][1] == holder and pieces[-1][0].stop == rows.start:
        rows = range(pieces.pop()[0].start, rows.stop)
    pieces.append((rows, holder))


def find_segments(depth: Ints, subtree_end: Ints) -> list[Segment]:
    """Every maximal unbranched run, in order."""
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
