"""Whether the aggregator can tell right traces from wrong ones, inferred from its answers.

Counted are answers to sets that hold both right and wrong members. An answer that equals some
member's answer chooses it: it accepts every member with that answer, and rejects the others.

- `right_choice`: how often a choice is right; `chance`: the same if a member that has an answer
  were picked at random
- `accepts_right`: share of right members accepted; `rejects_wrong`: share of wrong members rejected
- `balanced_accuracy`: mean of the two; `chance_balanced_accuracy`: the same of a random pick.
  (Where a problem has many right answers, as the demo's has, no choice can accept all.)
- `novel`: share of the answers that are no member's, and so choose nothing; `novel_right`: how
  often these are right
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from spiral_mega.rewards.agreement import Groups
from spiral_mega.statistics.intervals import ratio
from spiral_mega.traces import Episode


def episode_stats(episode: Episode, groups: Groups) -> dict[str, float]:
    """Return sums over the answers to the mixed sets of one episode."""
    sums: Counter[str] = Counter()
    traces = episode.traces()
    position = len(episode.search)  # of the set's first answer
    for members, answers in episode.answered_sets():
        right = [traces[member].reward >= 1.0 for member in members]
        if any(right) and not all(right):
            member_groups = [groups[member] for member in members]
            for at, answer in enumerate(answers, start=position):
                sums.update(_answer_stats(groups[at], answer.reward >= 1.0, member_groups, right))
        position += len(answers)
    return dict(sums)


def _answer_stats(
    chosen: int | None, succeeded: bool, groups: Sequence[int | None], right: Sequence[bool]
) -> dict[str, float]:
    """Return what one answer adds to the sums; `groups` and `right` are of its set's members."""
    if chosen is None or chosen not in groups:
        return {"answers": 1.0, "novel": 1.0, "novel_right": float(succeeded)}
    votes = Counter(group for group in groups if group is not None)
    # How likely a member picked at random, among those with an answer, has this member's answer.
    chances = [votes[group] / votes.total() if group is not None else 0.0 for group in groups]
    members = list(zip(groups, right, chances, strict=True))
    right_with_answer = sum(ok for group, ok, _ in members if group is not None)
    return {
        "answers": 1.0,
        "choices": 1.0,
        "right_choices": float(succeeded),
        "chance": right_with_answer / votes.total(),
        "right_members": float(sum(right)),
        "accepted": float(sum(ok and group == chosen for group, ok, _ in members)),
        "chance_accepted": sum(chance for _, ok, chance in members if ok),
        "wrong_members": float(len(right) - sum(right)),
        "rejected": float(sum(not ok and group != chosen for group, ok, _ in members)),
        "chance_rejected": sum(1 - chance for _, ok, chance in members if not ok),
    }


def aggregate(stats: Sequence[dict[str, float]], seed: int) -> dict[str, Any]:
    """Return the quantities above; each None where no answer counts for it."""

    def share(part: str, whole: str) -> dict[str, Any] | None:
        parts = [each.get(part, 0.0) for each in stats]
        wholes = [each.get(whole, 0.0) for each in stats]
        return ratio(parts, wholes, seed)

    accepts_right = share("accepted", "right_members")
    rejects_wrong = share("rejected", "wrong_members")
    chance_accepts = share("chance_accepted", "right_members")
    chance_rejects = share("chance_rejected", "wrong_members")
    return {
        "right_choice": share("right_choices", "choices"),
        "chance": share("chance", "choices"),
        "accepts_right": accepts_right,
        "rejects_wrong": rejects_wrong,
        "novel": share("novel", "answers"),
        "novel_right": share("novel_right", "novel"),
        "balanced_accuracy": _balanced(accepts_right, rejects_wrong),
        "chance_balanced_accuracy": _balanced(chance_accepts, chance_rejects),
    }


def _balanced(accepts: dict[str, Any] | None, rejects: dict[str, Any] | None) -> float | None:
    return None if accepts is None or rejects is None else (accepts["value"] + rejects["value"]) / 2
