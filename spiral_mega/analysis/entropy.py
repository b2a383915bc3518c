"""Token entropy (the paper's figure 6): the mean -log-prob of the sampled tokens.

It is an unbiased estimate of the sampler's entropy. Also by position in the response: `tenths`
covers its first tenth to its last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spiral_mega.analysis.levels import group_by_level, level_name, level_positions
from spiral_mega.rewards.agreement import Groups
from spiral_mega.statistics.intervals import ratio
from spiral_mega.traces import Episode

TENTHS = 10

LevelNll = dict[str, list[float]]


def episode_stats(episode: Episode, groups: Groups) -> list[LevelNll]:
    """Return one dict a level: for each tenth, the sum of -log-prob in nats, and the tokens.

    Tokens whose log-prob is not finite are left out: -inf, or NaN where an environment wrote them.
    """
    traces = episode.traces()
    stats = []
    for positions in level_positions(episode):
        nll, tokens = [0.0] * TENTHS, [0.0] * TENTHS
        for i in positions:
            logprobs = traces[i].logprobs
            for at, logprob in enumerate(logprobs):
                if math.isfinite(logprob):
                    tenth = at * TENTHS // len(logprobs)
                    nll[tenth] -= logprob
                    tokens[tenth] += 1
        stats.append({"nll": nll, "tokens": tokens})
    return stats


def aggregate(stats: Sequence[list[LevelNll]], seed: int) -> list[dict[str, Any]]:
    """Return, by level, the entropy in nats per token, whole and of each tenth (None without tokens)."""
    summaries = []
    for level, problems in enumerate(group_by_level(stats)):
        nll = [sum(each["nll"]) for each in problems]
        tokens = [sum(each["tokens"]) for each in problems]
        tenths = [_tenth_entropy(problems, tenth) for tenth in range(TENTHS)]
        summaries.append(
            {"level": level_name(level), "entropy": ratio(nll, tokens, seed), "tenths": tenths}
        )
    return summaries


def _tenth_entropy(problems: Sequence[LevelNll], tenth: int) -> float | None:
    nll = sum(each["nll"][tenth] for each in problems)
    tokens = sum(each["tokens"][tenth] for each in problems)
    return nll / tokens if tokens else None
