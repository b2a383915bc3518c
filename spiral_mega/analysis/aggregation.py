"""How aggregation succeeds on a set, by how many of its members are right (reward 1 or more).

- `none_right`: how often it succeeds although no member is right
- `minority_right`: how often it recovers the right answer from fewer than half
- `half_right`
- `majority_right`: how often it keeps what more than half have right; `breaks_majority` is the rest
- `all_right`: as above, where every member is right (it is not counted under `majority_right`)

`plurality_wrong` narrows `minority_right` to what voting cannot do: some member is right, and the
answer that most members give (ties broken by the first) is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from spiral_mega.rewards.agreement import Groups
from spiral_mega.statistics.intervals import ratio
from spiral_mega.traces import Episode

SetStats = dict[str, Any]

CASES: dict[str, Callable[[SetStats], bool]] = {
    "none_right": lambda each: each["right"] == 0,
    "minority_right": lambda each: 0 < 2 * each["right"] < each["size"],
    "half_right": lambda each: 2 * each["right"] == each["size"],
    "majority_right": lambda each: each["size"] < 2 * each["right"] < 2 * each["size"],
    "all_right": lambda each: each["right"] == each["size"],
    "plurality_wrong": lambda each: each["right"] > 0 and not each["plurality_right"],
}


def episode_stats(episode: Episode, groups: Groups) -> list[SetStats]:
    """Return, by set, size, right members, whether their plurality is right, answers, right answers."""
    traces = episode.traces()
    stats = []
    for members, answers in episode.answered_sets():
        right = [traces[member].reward >= 1.0 for member in members]
        stats.append(
            {
                "size": len(members),
                "right": sum(right),
                "plurality_right": _is_plurality_right(
                    [groups[member] for member in members], right
                ),
                "answers": len(answers),
                "succeeded": sum(answer.reward >= 1.0 for answer in answers),
            }
        )
    return stats


def _is_plurality_right(groups: Groups, right: Sequence[bool]) -> bool:
    """Return whether a member with the most common answer is right; False where no member has an answer."""
    votes = Counter(group for group in groups if group is not None)
    if not votes:
        return False
    plurality, _ = votes.most_common(1)[0]
    return any(ok for group, ok in zip(groups, right, strict=True) if group == plurality)


def aggregate(stats: Sequence[list[SetStats]], seed: int) -> dict[str, Any]:
    """Return success rates by case, each with the number of its answers, and `by_right`: by number of right members."""
    cases: dict[str, Any] = {name: _success(stats, case, seed) for name, case in CASES.items()}
    kept = cases["majority_right"]
    if kept is not None:
        low, high = kept["interval"]
        cases["breaks_majority"] = kept | {
            "value": 1 - kept["value"],
            "interval": [1 - high, 1 - low],
        }
    compositions = {(each["size"], each["right"]) for sets in stats for each in sets}
    by_right = []
    for size, right in sorted(compositions):
        success = _success(stats, _has_composition(size, right), seed) or {}
        by_right.append({"size": size, "right": right} | success)
    return cases | {"by_right": by_right}


def _has_composition(size: int, right: int) -> Callable[[SetStats], bool]:
    return lambda each: (each["size"], each["right"]) == (size, right)


def _success(
    stats: Sequence[list[SetStats]], case: Callable[[SetStats], bool], seed: int
) -> dict[str, Any] | None:
    """Return the share of right answers to the sets of one case, with problems as the unit of resampling."""
    succeeded, answers = [], []
    for sets in stats:
        chosen = [each for each in sets if case(each)]
        succeeded.append(sum(each["succeeded"] for each in chosen))
        answers.append(sum(each["answers"] for each in chosen))
    return ratio(succeeded, answers, seed)
