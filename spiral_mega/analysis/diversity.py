"""How different the traces of one problem are, by level: in their answers and in their n-grams.

- `answers`: distinct answers, by the verifier's judgement, among the traces that give one
- `answer_entropy`: entropy of the answers' shares, in nats (plug-in: biased low for few traces)
- `distinct_ngrams`: distinct token n-grams over all n-grams of the level (distinct-n, Li et al.,
  2016)
- `ngram_entropy`: entropy of the pooled n-grams, in nats
- `distance`: mean over pairs of traces of 1 - Jaccard similarity of their sets of n-grams

The number of traces and their length influence all but `distance`: compare models at equal numbers,
and see `length`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from spiral_mega.analysis.levels import group_by_level, level_name, level_positions
from spiral_mega.rewards.agreement import Groups
from spiral_mega.statistics.intervals import mean
from spiral_mega.traces import Episode

NGRAM = 3  # tokens; a shorter response is one n-gram
QUANTITIES = (
    "traces",
    "answered",
    "answers",
    "answer_entropy",
    "distinct_ngrams",
    "ngram_entropy",
    "distance",
    "length",
)

LevelDiversity = dict[str, float | None]


def episode_stats(episode: Episode, groups: Groups) -> list[LevelDiversity]:
    """Return the `QUANTITIES` of each level; None where undefined (no answer, one trace, no token)."""
    traces = episode.traces()
    stats = []
    for positions in level_positions(episode):
        responses = [traces[i].response_ids for i in positions]
        stats.append(level_diversity(responses, [groups[i] for i in positions]))
    return stats


def level_diversity(responses: Sequence[Sequence[int]], groups: Groups) -> LevelDiversity:
    """Compute `QUANTITIES` for some traces of one problem, from their tokens and answer groups."""
    answers = Counter(group for group in groups if group is not None)
    ngrams = [_ngrams(response) for response in responses]
    pooled = Counter(ngram for of_response in ngrams for ngram in of_response)
    distances = _pairwise_distances([set(of_response) for of_response in ngrams])
    return {
        "traces": float(len(responses)),
        "answered": float(answers.total()),
        "answers": float(len(answers)) if answers else None,
        "answer_entropy": entropy(answers) if answers else None,
        "distinct_ngrams": len(pooled) / pooled.total() if pooled else None,
        "ngram_entropy": entropy(pooled) if pooled else None,
        "distance": math.fsum(distances) / len(distances) if distances else None,
        "length": sum(map(len, responses)) / len(responses) if responses else None,
    }


def entropy(counts: Counter[Any]) -> float:
    """Return the entropy of the shares of `counts`, in nats."""
    total = counts.total()
    return math.fsum(-count / total * math.log(count / total) for count in counts.values() if count)


def aggregate(stats: Sequence[list[LevelDiversity]], seed: int) -> list[dict[str, Any]]:
    """Return, by level, its name and each quantity's mean over the problems that have it."""
    summaries = []
    for level, problems in enumerate(group_by_level(stats)):
        summary: dict[str, Any] = {"level": level_name(level)}
        for quantity in QUANTITIES:
            values = [each[quantity] for each in problems]
            summary[quantity] = mean([value for value in values if value is not None], seed)
        summaries.append(summary)
    return summaries


def _ngrams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    if len(tokens) < NGRAM:
        return [tuple(tokens)] if tokens else []
    return [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]


def _pairwise_distances(ngram_sets: Sequence[set[tuple[int, ...]]]) -> list[float]:
    """Return 1 - Jaccard similarity of every pair that has an n-gram."""
    distances = []
    for a, b in combinations(ngram_sets, 2):
        if a or b:
            distances.append(1.0 - len(a & b) / len(a | b))
    return distances
