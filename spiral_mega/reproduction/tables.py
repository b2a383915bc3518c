"""What was measured as Markdown, for docs/results/reproduction.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spiral_mega.errors import UserError
from spiral_mega.reproduction.mechanism import favour

BEGIN, END = "<!-- {start}: written by spiral_mega.reproduction -->", "<!-- end of {start} -->"


def markdown(report: Mapping[str, Any]) -> str:
    """The runs, every arm's measures, the comparisons, efficiency, entropy, and the aggregator's success by set."""
    parts = (_settings, _measures, _comparisons, _efficiency, _entropy, _success)
    return "\n\n".join(part(report) for part in parts)


def write_into(document: Path, text: str, start: str) -> None:
    """Replace what is between the start's two marks. Raises UserError when the document lacks them."""
    begin, end = BEGIN.format(start=start), END.format(start=start)
    whole = document.read_text(encoding="utf-8")
    if begin not in whole or end not in whole[whole.index(begin) :]:
        raise UserError(f"{document} lacks the lines {begin!r} and {end!r} between which the tables are written")
    head, _, rest = whole.partition(begin)
    document.write_text(f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def _settings(report: Mapping[str, Any]) -> str:
    seeds = ", ".join(f"{arm['title']}: {len(arm['seeds'])}" for arm in report["arms"].values())
    more = f" Overrides: `{' '.join(report['overrides'])}`." if report["overrides"] else ""
    return (
        f"{report['steps']} steps, {report['problems']} held-out problems. Seeds: {seeds}.{more} Percent; 95 % "
        "intervals over seeds and problems."
    )


def _measures(report: Mapping[str, Any]) -> str:
    names = [name for name in report["shown"] if all(name in arm["measures"] for arm in report["arms"].values())]
    rows = [["", *names]]
    for arm in report["arms"].values():
        rows.append([arm["title"], *(_value(arm["measures"][name]) for name in names)])
    return table([list(column) for column in zip(*rows, strict=True)])


def _value(measure: Mapping[str, Any]) -> str:
    low, high = measure["crossed"]
    return f"{100 * measure['mean']:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _comparisons(report: Mapping[str, Any]) -> str:
    rows = [["SPIRAL minus", "quantity", "points", "over problems", "over seeds and problems", "by seed", "finding"]]
    for each in report["comparisons"]:
        intervals = [f"{100 * each[key][0]:+.1f} to {100 * each[key][1]:+.1f}" for key in ("problems", "crossed")]
        by_seed = ", ".join(f"{100 * value:+.1f}" for value in each["by_seed"])
        title = report["arms"][each["other"]]["title"]
        rows.append([title, each["quantity"], f"{100 * each['mean']:+.1f}", *intervals, by_seed,
                     f"{each['claim']}: {each['verdict']}"])  # fmt: skip
    return table(rows)


def _efficiency(report: Mapping[str, Any]) -> str:
    ks = [str(k) for k in report["ks"]]
    rows = [["responses that another needs for SPIRAL's pass@k, over k", *(f"k = {k}" for k in ks)]]
    for name, factors in report["efficiency"].items():
        rows.append([report["arms"][name]["title"], *("-" if (f := factors[k]) is None else f"{f:.2f}" for k in ks)])
    return table(rows)


def _entropy(report: Mapping[str, Any]) -> str:
    rows = [["token entropy of search, nats, by seed", "first 10 steps", "last 10 steps"]]
    for arm in report["arms"].values():
        if arm["entropy"]:
            curves = [[value for _, value in curve] for curve in arm["entropy"]]
            parts = ([curve[:10] for curve in curves], [curve[-10:] for curve in curves])
            ends = [[sum(values) / len(values) for values in part] for part in parts]
            rows.append([arm["title"], *(", ".join(f"{value:.2f}" for value in end) for end in ends)])
    return table(rows)


def _success(report: Mapping[str, Any]) -> str:
    """Means over the seeds that have such sets."""
    rows: list[list[str]] = []
    for arm in report["arms"].values():
        by_right = [[v for v in values if v is not None] for values in zip(*arm["success"], strict=True)]
        means = [sum(values) / len(values) if values else None for values in by_right]
        whole = [mean for mean in means if mean is not None]
        favoured = f"{favour(whole):.2f}" if len(whole) == len(means) else "-"
        rows.append([arm["title"], *("-" if m is None else f"{100 * m:.1f}" for m in means), favoured])
    heads = [f"{right} right" for right in range(len(rows[0]) - 2)]
    return table([["aggregation succeeds, of sets with", *heads, "F'(0.1) / F'(0.5)"], *rows])


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first row its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *body])
