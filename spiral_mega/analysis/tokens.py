"""Where tokens are spent, by solve rate: the mean reward of a problem's search traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spiral_mega.analysis.levels import group_by_level, level_name, level_positions
from spiral_mega.rewards.agreement import Groups
from spiral_mega.statistics.intervals import mean, ratio
from spiral_mega.traces import Episode, Trace

BINS = ("none", "up to 1/4", "up to 1/2", "up to 3/4", "below all", "all")
"""Bins of solve rates: 0, (0, 1/4], (1/4, 1/2], (1/2, 3/4], (3/4, 1), 1 and above."""


def episode_stats(episode: Episode, groups: Groups) -> dict[str, Any]:
    """Return the solve rate, and by level the tokens and number of right, wrong, truncated traces."""
    traces = episode.traces()
    rewards = [trace.reward for trace in episode.search]
    levels = []
    for positions in level_positions(episode):
        levels.append(_level_stats([traces[i] for i in positions]))
    return {"solve_rate": math.fsum(rewards) / len(rewards), "levels": levels}


def _level_stats(traces: Sequence[Trace]) -> dict[str, int]:
    right = [trace.length for trace in traces if trace.reward >= 1.0]
    wrong = [trace.length for trace in traces if not trace.reward >= 1.0]
    return {
        "right_tokens": sum(right),
        "right": len(right),
        "wrong_tokens": sum(wrong),
        "wrong": len(wrong),
        "truncated": sum(trace.finish == "length" for trace in traces),
    }


def difficulty(solve_rate: float) -> int:
    """Return the index in `BINS` of a solve rate."""
    if solve_rate <= 0:
        return 0
    return len(BINS) - 1 if solve_rate >= 1 else math.ceil(4 * solve_rate)


def aggregate(stats: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return, by bin that has problems, their number and by level the mean tokens of traces."""
    summaries = []
    for index, name in enumerate(BINS):
        problems = [each for each in stats if difficulty(each["solve_rate"]) == index]
        if not problems:
            continue
        levels = []
        for level, entries in enumerate(group_by_level([each["levels"] for each in problems])):
            levels.append({"level": level_name(level)} | _aggregate_level(entries, seed))
        summaries.append(
            {
                "solved": name,
                "problems": len(problems),
                "solve_rate": mean([each["solve_rate"] for each in problems], seed),
                "levels": levels,
            }
        )
    return summaries


def _aggregate_level(entries: Sequence[dict[str, int]], seed: int) -> dict[str, Any]:
    right_tokens = [each["right_tokens"] for each in entries]
    wrong_tokens = [each["wrong_tokens"] for each in entries]
    right = [each["right"] for each in entries]
    wrong = [each["wrong"] for each in entries]
    tokens = [each["right_tokens"] + each["wrong_tokens"] for each in entries]
    traces = [each["right"] + each["wrong"] for each in entries]
    return {
        "tokens": ratio(tokens, traces, seed),
        "right": ratio(right_tokens, right, seed),
        "wrong": ratio(wrong_tokens, wrong, seed),
        "truncated": ratio([each["truncated"] for each in entries], traces, seed),
    }
