"""How the math verifier judges answers that were marked by hand, and what a verification costs; next to math-verify.

    OMP_NUM_THREADS=1 python -m benchmarks.verifier tests/rewards/data/marked_answers.json

A file holds rows {"kind", "response", "gold", "right"}. By kind: wrong answers that are paid, and right ones that are
refused. Costs are milliseconds for each verification: cold is the first pass over a file in a process that has
imported everything, warm the second. A fresh process measures each contender; `start` is its seconds to import and to
verify one answer. math-verify alone means `math_verify.verify(parse(gold), parse(response))`, with its time limit.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

CONTENDERS = ("this verifier", "math-verify")
_DATA = Path(__file__).parent.parent / "tests" / "rewards" / "data"
_FILES = [_DATA / "marked_answers.json", _DATA / "own_answers.json"]
_WARM_UP = ("\\boxed{x^{2}+1}", ("(x^{2}+2x)/x",))
_TIME_LIMIT_S = 5

Row = dict[str, Any]
Judge = Callable[[str, tuple[str, ...]], float]


class Tally(NamedTuple):
    """Answers of one kind: how many, how many wrong ones were paid, and how many right ones refused."""

    answers: int
    paid: int
    refused: int


def main(
    files: Annotated[
        list[Path] | None, typer.Argument(help="marked answers; those of the tests without any")
    ] = None,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Judge marked answers with every contender, each in a process of its own."""
    for file in files or _FILES:
        rows = json.loads(file.read_text())
        if child is not None:
            print(json.dumps(measure(child, rows)))
        else:
            results = {name: _in_fresh_process(name, file) for name in CONTENDERS}
            print(
                f"{file.name}: {len(rows)} answers, {sum(row['right'] for row in rows)} of them right"
            )
            print(report(rows, results))


def measure(contender: str, rows: list[Row]) -> dict[str, Any]:
    """Return the verdicts, the seconds of start-up, and the seconds of each verification, cold and warm."""
    began = time.perf_counter()
    judge = _JUDGES[contender]()
    judge(*_WARM_UP)
    started = time.perf_counter() - began
    passes = [_timed_pass(judge, rows) for _ in ("cold", "warm")]
    return {"start": started, "cold": passes[0][1], "warm": passes[1][1], "verdicts": passes[0][0]}


def report(rows: list[Row], results: dict[str, dict[str, Any]]) -> str:
    """The table of wrong payments and refusals by kind, and the costs."""
    tallies = {name: tally(rows, result["verdicts"]) for name, result in results.items()}
    lines = [
        f"{'kind':20} {'answers':>7}" + "".join(f" | {name:>13}: paid refused" for name in results)
    ]
    for kind in [*sorted({row["kind"] for row in rows}), "all"]:
        cells = [f" | {each[kind].paid:>19} {each[kind].refused:>7}" for each in tallies.values()]
        answers = next(iter(tallies.values()))[kind].answers
        lines.append(f"{kind:20} {answers:>7}" + "".join(cells))
    for name, result in results.items():
        costs = [f"{phase} {_milliseconds(result[phase])}" for phase in ("cold", "warm")]
        lines.append(f"{name}: start {result['start']:.2f} s; {'; '.join(costs)}")
    return "\n".join(lines)


def tally(rows: list[Row], verdicts: list[float]) -> dict[str, Tally]:
    """Count wrong payments and refusals by kind, and for "all"."""
    counts = {"all": Tally(0, 0, 0)}
    for row, verdict in zip(rows, verdicts, strict=True):
        paid = verdict > 0 and not row["right"]
        refused = verdict == 0 and bool(row["right"])
        for kind in (row["kind"], "all"):
            before = counts.get(kind, Tally(0, 0, 0))
            counts[kind] = Tally(before.answers + 1, before.paid + paid, before.refused + refused)
    return counts


def golds_of(row: Row) -> tuple[str, ...]:
    """The accepted ground truths of a row."""
    gold = row["gold"]
    return tuple(gold) if isinstance(gold, list) else (gold,)


def _timed_pass(judge: Judge, rows: list[Row]) -> tuple[list[float], list[float]]:
    verdicts, seconds = [], []
    for row in rows:
        began = time.perf_counter()
        verdicts.append(judge(row["response"], golds_of(row)))
        seconds.append(time.perf_counter() - began)
    return verdicts, seconds


def _milliseconds(seconds: list[float]) -> str:
    ordered = sorted(1000 * second for second in seconds)
    at_90 = ordered[int(0.9 * len(ordered))]
    return f"mean {statistics.mean(ordered):.3f} ms, median {statistics.median(ordered):.3f}, 90 % {at_90:.3f}"


def _in_fresh_process(contender: str, file: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.verifier", str(file), "--child", contender]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def _own() -> Judge:
    from spiral_mega.rewards.math_answer import (
        score,
    )  # imported here: what importing costs is measured

    return score


def _math_verify() -> Judge:
    import math_verify

    def judge(response: str, golds: tuple[str, ...]) -> float:
        given = math_verify.parse(response, parsing_timeout=_TIME_LIMIT_S)
        for gold in golds:
            parsed = math_verify.parse(f"\\boxed{{{gold}}}", parsing_timeout=_TIME_LIMIT_S)
            if math_verify.verify(parsed, given, timeout_seconds=_TIME_LIMIT_S):
                return 1.0
        return 0.0

    return judge


_JUDGES: dict[str, Callable[[], Judge]] = {"this verifier": _own, "math-verify": _math_verify}

if __name__ == "__main__":
    typer.run(main)
