"""How different the traces of one problem are, level by level: by their answers, and by their words.

- `answers`: distinct answers, as the verifier tells them apart, among the traces that give one
- `answer_entropy`: entropy of the answers' shares, in nats (plug-in: it is biased low for few traces)
- `distinct_ngrams`: distinct token n-grams over all n-grams of the level (distinct-n, Li et al., 2016)
- `ngram_entropy`: entropy of the pooled n-grams, in nats
- `distance`: mean over pairs of traces of 1 - Jaccard similarity of their sets of n-grams

The number of traces and their length influence all but the last: compare models at equal numbers, and see `length`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from spiral_mega.analysis.levels import level_name, levels
from spiral_mega.rewards.agreement import Groups
from spiral_mega.statistics.intervals import mean
from spiral_mega.traces import Episode

NGRAM = 3  # tokens; a response with fewer is one gram
FIGURES = ("traces", "answered", "answers", "answer_entropy", "distinct_ngrams", "ngram_entropy", "distance", "length")


def facts(episode: Episode, groups: Groups) -> list[dict[str, float | None]]:
    """One dict a level of the figures above; None where they say nothing (no answer, one trace, no token)."""
    traces = episode.traces()
    return [
        level_diversity([traces[i].response_ids for i in positions], [groups[i] for i in positions])
        for positions in levels(episode)
    ]


def level_diversity(responses: Sequence[Sequence[int]], groups: Groups) -> dict[str, float | None]:
    """The figures of some traces of one problem: their tokens and the groups of their answers."""
    answers = Counter(group for group in groups if group is not None)
    grams = [_grams(response) for response in responses]
    pooled = Counter(gram for each in grams for gram in each)
    sets = [set(each) for each in grams]
    pairs = [1.0 - len(a & b) / len(a | b) for a, b in combinations(sets, 2) if a or b]
    return {
        "traces": float(len(responses)),
        "answered": float(answers.total()),
        "answers": float(len(answers)) if answers else None,
        "answer_entropy": entropy(answers) if answers else None,
        "distinct_ngrams": len(pooled) / pooled.total() if pooled else None,
        "ngram_entropy": entropy(pooled) if pooled else None,
        "distance": math.fsum(pairs) / len(pairs) if pairs else None,
        "length": sum(map(len, responses)) / len(responses) if responses else None,
    }


def entropy(counts: Counter[Any]) -> float:
    """Of the shares of `counts`, in nats."""
    total = counts.total()
    return math.fsum(-count / total * math.log(count / total) for count in counts.values() if count)


def summary(facts: Sequence[list[dict[str, float | None]]], seed: int) -> list[dict[str, Any]]:
    """One dict a level: its name, and each figure's mean over the problems that have it."""
    depth = max(map(len, facts), default=0)
    return [
        {"level": level_name(level)}
        | {
            figure: mean([v for each in facts if len(each) > level and (v := each[level][figure]) is not None], seed)
            for figure in FIGURES
        }
        for level in range(depth)
    ]


def _grams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    if len(tokens) < NGRAM:
        return [tuple(tokens)] if tokens else []
    return [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
