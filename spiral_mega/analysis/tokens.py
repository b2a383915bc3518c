"""Where tokens are spent, by how hard the problem is: its difficulty is the mean reward of its search traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spiral_mega.analysis.levels import level_name, levels
from spiral_mega.rewards.agreement import Groups
from spiral_mega.statistics.intervals import mean, ratio
from spiral_mega.traces import Episode

BINS = ("none", "up to 1/4", "up to 1/2", "up to 3/4", "below all", "all")
"""Of solve rates: 0, (0, 1/4], (1/4, 1/2], (1/2, 3/4], (3/4, 1), 1 and above."""


def facts(episode: Episode, groups: Groups) -> dict[str, Any]:
    """The solve rate, and for each level tokens and numbers of the right and the wrong traces, and of those cut."""
    traces = episode.traces()
    rates = [trace.reward for trace in episode.search]
    found = []
    for positions in levels(episode):
        here = [traces[i] for i in positions]
        lengths = {flag: [trace.length for trace in here if (trace.reward >= 1.0) is flag] for flag in (True, False)}
        found.append(
            {
                "right_tokens": sum(lengths[True]),
                "right": len(lengths[True]),
                "wrong_tokens": sum(lengths[False]),
                "wrong": len(lengths[False]),
                "cut": sum(trace.finish == "length" for trace in here),
            }
        )
    return {"solve_rate": math.fsum(rates) / len(rates), "levels": found}


def difficulty(solve_rate: float) -> int:
    """The bin of a solve rate."""
    if solve_rate <= 0:
        return 0
    return len(BINS) - 1 if solve_rate >= 1 else math.ceil(4 * solve_rate)


def summary(facts: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """One dict a bin that holds problems: how many, and by level mean tokens of all, right and wrong traces."""
    found = []
    for index, name in enumerate(BINS):
        here = [each for each in facts if difficulty(each["solve_rate"]) == index]
        if not here:
            continue
        depth = max(len(each["levels"]) for each in here)
        found.append(
            {
                "solved": name,
                "problems": len(here),
                "solve_rate": mean([each["solve_rate"] for each in here], seed),
                "levels": [
                    {"level": level_name(i)} | _level([e["levels"][i] for e in here if len(e["levels"]) > i], seed)
                    for i in range(depth)
                ],
            }
        )
    return found


def _level(facts: Sequence[dict[str, int]], seed: int) -> dict[str, Any]:
    right_tokens, right = [e["right_tokens"] for e in facts], [e["right"] for e in facts]
    wrong_tokens, wrong = [e["wrong_tokens"] for e in facts], [e["wrong"] for e in facts]
    traces = [a + b for a, b in zip(right, wrong, strict=True)]
    return {
        "tokens": ratio([a + b for a, b in zip(right_tokens, wrong_tokens, strict=True)], traces, seed),
        "right": ratio(right_tokens, right, seed),
        "wrong": ratio(wrong_tokens, wrong, seed),
        "cut": ratio([e["cut"] for e in facts], traces, seed),
    }
