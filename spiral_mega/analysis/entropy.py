"""Token entropy (the paper's figure 6): -mean log-prob of the sampled tokens, an unbiased estimate of the sampler's.

Also by where in the response: `tenths` are the tokens of its first tenth to its last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spiral_mega.analysis.levels import level_name, levels
from spiral_mega.rewards.agreement import Groups
from spiral_mega.statistics.intervals import ratio
from spiral_mega.traces import Episode

TENTHS = 10


def facts(episode: Episode, groups: Groups) -> list[dict[str, list[float]]]:
    """One dict a level: for each tenth, the sum of -log-prob in nats, and the tokens; those of -inf are left out."""
    traces = episode.traces()
    found = []
    for positions in levels(episode):
        surprise, tokens = [0.0] * TENTHS, [0.0] * TENTHS
        for i in positions:
            for at, logprob in enumerate(traces[i].logprobs):
                if math.isfinite(logprob):
                    tenth = at * TENTHS // len(traces[i].logprobs)
                    surprise[tenth] -= logprob
                    tokens[tenth] += 1
        found.append({"surprise": surprise, "tokens": tokens})
    return found


def summary(facts: Sequence[list[dict[str, list[float]]]], seed: int) -> list[dict[str, Any]]:
    """One dict a level: the entropy in nats per token, and that of each tenth (None where no token is)."""
    found = []
    for level in range(max(map(len, facts), default=0)):
        here = [each[level] for each in facts if len(each) > level]
        sums = [[sum(each[key][tenth] for each in here) for tenth in range(TENTHS)] for key in ("surprise", "tokens")]
        found.append(
            {
                "level": level_name(level),
                "entropy": ratio([sum(e["surprise"]) for e in here], [sum(e["tokens"]) for e in here], seed),
                "tenths": [s / n if n else None for s, n in zip(*sums, strict=True)],
            }
        )
    return found
