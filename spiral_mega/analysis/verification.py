"""Can the aggregator tell right traces from wrong ones? Read off its choices, without asking it.

Over answers to sets that hold both right and wrong members: an answer that is some member's answer has chosen it, and
so accepts every member with that answer and rejects the others.

- `right_choice`: how often a choice is right; `chance` of it, if a member that has an answer were picked at random
- `balanced_accuracy`: mean of the share of right members accepted and the share of wrong members rejected; again with
  `chance_balanced_accuracy`. (Where a problem has many right answers, as the demo's has, no choice can accept all.)
- `fresh`: share of the answers that are no member's, and so choose nothing; `fresh_right`: how often these are right
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from spiral_mega.rewards.agreement import Groups
from spiral_mega.statistics.intervals import ratio
from spiral_mega.traces import Episode


def facts(episode: Episode, groups: Groups) -> dict[str, float]:
    """Sums over the answers to the mixed sets of one episode."""
    sums: Counter[str] = Counter()
    traces = episode.traces()
    position = len(episode.search)
    for members, answers in episode.answered_sets():
        positions = range(position, position + len(answers))
        position += len(answers)
        right = [traces[member].reward >= 1.0 for member in members]
        if any(right) and not all(right):
            for at in positions:
                sums.update(_answer(groups[at], traces[at].reward >= 1.0, [groups[m] for m in members], right))
    return dict(sums)


def _answer(chosen: int | None, succeeded: bool, groups: Groups, right: list[bool]) -> dict[str, float]:
    """What one answer adds: `groups` and `right` are its set's members'."""
    if chosen is None or chosen not in groups:
        return {"answers": 1.0, "fresh": 1.0, "fresh_right": float(succeeded)}
    votes = Counter(group for group in groups if group is not None)
    members = list(zip(groups, right, strict=True))
    share = [votes[group] / votes.total() if group is not None else 0.0 for group in groups]  # picked at random
    return {
        "answers": 1.0,
        "choices": 1.0,
        "right_choices": float(succeeded),
        "chance": sum(ok for group, ok in members if group is not None) / votes.total(),
        "right_members": float(sum(right)),
        "accepted": float(sum(ok and group == chosen for group, ok in members)),
        "chance_accepted": sum(p for p, ok in zip(share, right, strict=True) if ok),
        "wrong_members": float(len(right) - sum(right)),
        "rejected": float(sum(not ok and group != chosen for group, ok in members)),
        "chance_rejected": sum(1 - p for p, ok in zip(share, right, strict=True) if not ok),
    }


def summary(facts: Sequence[dict[str, float]], seed: int) -> dict[str, Any]:
    """The figures above; each None where no answer counts for it."""

    def of(part: str, whole: str) -> dict[str, Any] | None:
        return ratio([each.get(part, 0.0) for each in facts], [each.get(whole, 0.0) for each in facts], seed)

    figures = {
        "right_choice": of("right_choices", "choices"),
        "chance": of("chance", "choices"),
        "accepts_right": of("accepted", "right_members"),
        "rejects_wrong": of("rejected", "wrong_members"),
        "fresh": of("fresh", "answers"),
        "fresh_right": of("fresh_right", "fresh"),
    }
    balanced = _balanced(figures["accepts_right"], figures["rejects_wrong"])
    chance = _balanced(of("chance_accepted", "right_members"), of("chance_rejected", "wrong_members"))
    return figures | {"balanced_accuracy": balanced, "chance_balanced_accuracy": chance}


def _balanced(accepts: dict[str, Any] | None, rejects: dict[str, Any] | None) -> float | None:
    return None if accepts is None or rejects is None else (accepts["value"] + rejects["value"]) / 2
