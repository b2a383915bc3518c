"""What aggregation makes of a set, by how many of its members are right (reward 1 or more).

- `none_right`: how often it succeeds although no member is right
- `minority_right`: how often it recovers the right answer from fewer than half
- `half_right`
- `majority_right`: how often it keeps what more than half have right; `breaks_majority` is the rest
- `all_right`: as above, where every member is right (it is not counted under `majority_right`)

`plurality_wrong` narrows the second case to what voting cannot do: some member is right, and the answer that most
members give (ties broken by the first) is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from spiral_mega.rewards.agreement import Groups
from spiral_mega.statistics.intervals import ratio
from spiral_mega.traces import Episode

Set = dict[str, Any]

CASES: dict[str, Callable[[Set], bool]] = {
    "none_right": lambda each: each["right"] == 0,
    "minority_right": lambda each: 0 < 2 * each["right"] < each["size"],
    "half_right": lambda each: 2 * each["right"] == each["size"],
    "majority_right": lambda each: each["size"] < 2 * each["right"] < 2 * each["size"],
    "all_right": lambda each: each["right"] == each["size"],
    "plurality_wrong": lambda each: each["right"] > 0 and not each["plurality_right"],
}


def facts(episode: Episode, groups: Groups) -> list[Set]:
    """One dict a set: its members and those right, whether their plurality is right, its answers and those right."""
    traces = episode.traces()
    found = []
    for members, answers in episode.answered_sets():
        right = [traces[member].reward >= 1.0 for member in members]
        votes = Counter(groups[member] for member in members if groups[member] is not None)
        leader = votes.most_common(1)[0][0] if votes else None
        voted = [
            ok for member, ok in zip(members, right, strict=True) if leader is not None and groups[member] == leader
        ]
        found.append(
            {
                "size": len(members),
                "right": sum(right),
                "plurality_right": any(voted),
                "answers": len(answers),
                "succeeded": sum(answer.reward >= 1.0 for answer in answers),
            }
        )
    return found


def summary(facts: Sequence[list[Set]], seed: int) -> dict[str, Any]:
    """Success rates by case, with how many answers they are of, and `by_right`: by the number of right members."""
    counts = sorted({(each["size"], each["right"]) for sets in facts for each in sets})
    cases: dict[str, Any] = {name: _success(facts, case, seed) for name, case in CASES.items()}
    kept = cases["majority_right"]
    if kept is not None:
        low, high = kept["interval"]
        cases["breaks_majority"] = kept | {"value": 1 - kept["value"], "interval": [1 - high, 1 - low]}
    by_right = [
        {"size": size, "right": right}
        | (_success(facts, lambda each: (each["size"], each["right"]) == (size, right), seed) or {})  # noqa: B023
        for size, right in counts
    ]
    return cases | {"by_right": by_right}


def _success(facts: Sequence[list[Set]], case: Callable[[Set], bool], seed: int) -> dict[str, Any] | None:
    chosen = [[each for each in sets if case(each)] for sets in facts]
    succeeded = [sum(each["succeeded"] for each in sets) for sets in chosen]
    return ratio(succeeded, [sum(each["answers"] for each in sets) for sets in chosen], seed)
