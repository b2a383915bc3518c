"""The levels of an episode: search traces, answers to sets of them, answers to sets of those, ..."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from spiral_mega.traces import Episode

T = TypeVar("T")


def level_positions(episode: Episode) -> list[list[int]]:
    """Return the positions in `episode.traces()` of each level; level 0 is the search.

    An answer's level is one more than the highest level of its set's members.
    """
    level_of = [0] * len(episode.search)  # by position
    positions = [list(range(len(episode.search)))]
    for members, answers in episode.answered_sets():
        level = 1 + max(level_of[member] for member in members)
        while len(positions) <= level:
            positions.append([])
        for _ in answers:
            positions[level].append(len(level_of))
            level_of.append(level)
    return positions


def level_name(level: int) -> str:
    return "search" if level == 0 else f"aggregation {level}"


def group_by_level(episodes: Sequence[Sequence[T]]) -> list[list[T]]:
    """Turn one list of levels for each episode into one list of episodes for each level."""
    depth = max(map(len, episodes), default=0)
    by_level: list[list[T]] = [[] for _ in range(depth)]
    for levels in episodes:
        for level, entry in enumerate(levels):
            by_level[level].append(entry)
    return by_level
