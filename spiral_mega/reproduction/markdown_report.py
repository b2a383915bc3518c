"""Write the comparison as Markdown tables, for docs/results/reproduction.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spiral_mega.errors import UserError
from spiral_mega.reproduction.set_score import hard_problem_weight

Report = Mapping[str, Any]

BEGIN, END = "<!-- {start}: written by spiral_mega.reproduction -->", "<!-- end of {start} -->"


def markdown(report: Report) -> str:
    """Format settings, measures, comparisons, efficiency, entropy, and success by set."""
    parts = (_settings, _measures, _comparisons, _efficiency, _entropy, _success)
    return "\n\n".join(part(report) for part in parts)


def write_into(document: Path, text: str, start: str) -> None:
    """Replace what is between the start's marks. Raises UserError if the document lacks them."""
    begin, end = BEGIN.format(start=start), END.format(start=start)
    content = document.read_text(encoding="utf-8")
    before, _, after_begin = content.partition(begin)
    _, found_end, after = after_begin.partition(end)
    if not found_end:
        raise UserError(
            f"{document} lacks the lines {begin!r} and {end!r} between which the tables are written"
        )
    document.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def _settings(report: Report) -> str:
    seeds = ", ".join(f"{arm['title']}: {len(arm['seeds'])}" for arm in report["arms"].values())
    overrides = f" Overrides: `{' '.join(report['overrides'])}`." if report["overrides"] else ""
    return (
        f"{report['steps']} steps, {report['problems']} held-out problems. Seeds: "
        f"{seeds}.{overrides} Percent; 95 % intervals over seeds and problems."
    )


def _measures(report: Report) -> str:
    """One row a measure that all arms have, one column an arm."""
    arms = list(report["arms"].values())
    rows = [["", *(arm["title"] for arm in arms)]]
    for name in report["shown"]:
        if all(name in arm["measures"] for arm in arms):
            rows.append([name, *(_percent_with_interval(arm["measures"][name]) for arm in arms)])
    return table(rows)


def _percent_with_interval(measure: Mapping[str, Any]) -> str:
    low, high = measure["crossed"]
    return f"{100 * measure['mean']:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _comparisons(report: Report) -> str:
    rows = [
        [
            "SPIRAL minus",
            "quantity",
            "points",
            "over problems",
            "over seeds and problems",
            "by seed",
            "finding",
        ]
    ]
    for difference in report["comparisons"]:
        rows.append(
            [
                report["arms"][difference["other"]]["title"],
                difference["quantity"],
                f"{100 * difference['mean']:+.1f}",
                _points(difference["problems"]),
                _points(difference["crossed"]),
                ", ".join(f"{100 * value:+.1f}" for value in difference["by_seed"]),
                f"{difference['claim']}: {difference['verdict']}",
            ]
        )
    return table(rows)


def _points(interval: Sequence[float]) -> str:
    low, high = interval
    return f"{100 * low:+.1f} to {100 * high:+.1f}"


def _efficiency(report: Report) -> str:
    ks = [str(k) for k in report["ks"]]
    rows = [["responses that another needs for SPIRAL's pass@k, over k", *(f"k = {k}" for k in ks)]]
    for name, factors in report["efficiency"].items():
        rows.append([report["arms"][name]["title"], *(_optional(factors[k], "{:.2f}") for k in ks)])
    return table(rows)


def _entropy(report: Report) -> str:
    rows = [["token entropy of search, nats, by seed", "first 10 steps", "last 10 steps"]]
    for arm in report["arms"].values():
        if arm["entropy"]:
            first = [_mean_entropy(curve[:10]) for curve in arm["entropy"]]
            last = [_mean_entropy(curve[-10:]) for curve in arm["entropy"]]
            rows.append([arm["title"], ", ".join(first), ", ".join(last)])
    return table(rows)


def _mean_entropy(curve: Sequence[tuple[int, float]]) -> str:
    values = [value for _, value in curve]
    return f"{sum(values) / len(values):.2f}"


def _success(report: Report) -> str:
    """Means over the seeds that have such sets."""
    rows: list[list[str]] = []
    for arm in report["arms"].values():
        means = [_mean_of_known(by_seed) for by_seed in zip(*arm["success"], strict=True)]
        known = [mean for mean in means if mean is not None]
        weight = f"{hard_problem_weight(known):.2f}" if len(known) == len(means) else "-"
        cells = [_optional(None if mean is None else 100 * mean, "{:.1f}") for mean in means]
        rows.append([arm["title"], *cells, weight])
    head = [f"{right} right" for right in range(len(rows[0]) - 2)]
    return table([["aggregation succeeds, of sets with", *head, "F'(0.1) / F'(0.5)"], *rows])


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table, the first row as its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *body])
