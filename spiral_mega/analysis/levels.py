"""The levels of an episode: its search traces, answers to sets of them, answers to sets of those, and so on."""

from __future__ import annotations

from spiral_mega.traces import Episode


def levels(episode: Episode) -> list[list[int]]:
    """Positions in `episode.traces()` by level; level 0 is the search."""
    place = list(range(len(episode.search)))
    found = [place[:]]
    depth = [0] * len(place)
    for members, group in episode.answered_sets():
        level = 1 + max(depth[member] for member in members)
        while len(found) <= level:
            found.append([])
        for _ in group:
            found[level].append(len(depth))
            depth.append(level)
    return found


def level_name(level: int) -> str:
    return "search" if level == 0 else f"aggregation {level}"
