"""Write short GSM8K problems with solved examples as earlier chat turns, within reach of a model of
135 M parameters.

A solution marks each calculation, as in "48/2 = <<48/2=24>>24". The script keeps problems of few
calculations, those with the shortest questions first. Each follows the same solved examples, which
show the format of an answer better than an instruction does: the shortest problems of two
calculations in the training set, with their own solutions.

    python tools/gsm8k_few_shot.py --source gsm8k_train.jsonl --output problems.jsonl --calculations 1 --limit 300
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

CALCULATION = re.compile(r"<<[^>]*>>")
Row = dict[str, str]


def read_rows(path: Path) -> list[Row]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            row["solution"], row["result"] = (
                part.strip() for part in row["answer"].rsplit("####", 1)
            )
    except (OSError, ValueError, KeyError) as error:
        sys.exit(
            f"error: {path} is not GSM8K as JSON lines, question and answer with #### ({error!r})"
        )
    return rows


def num_calculations(row: Row) -> int:
    return len(CALCULATION.findall(row["solution"]))


def solved(row: Row) -> list[dict[str, str]]:
    """Return a question and its solution as chat turns, with the result in a box."""
    answer = f"{CALCULATION.sub('', row['solution'])}\nThe answer is \\boxed{{{row['result']}}}."
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="GSM8K's problems as JSON lines")
    parser.add_argument(
        "--examples-from", type=Path, help="training set with the examples; default: the source"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument(
        "--calculations", type=int, default=1, help="most calculations of a solution"
    )
    parser.add_argument("--examples", type=int, default=3, help="number of solved examples")
    parser.add_argument("--limit", type=int, help="write only the first problems")
    arguments = parser.parse_args()

    rows = read_rows(arguments.source)
    two_steps = [
        row
        for row in read_rows(arguments.examples_from or arguments.source)
        if num_calculations(row) == 2
    ]
    examples = sorted(two_steps, key=lambda row: len(row["question"]) + len(row["solution"]))[
        : arguments.examples
    ]
    shown = {row["question"] for row in examples}
    fitting = [
        (len(row["question"]), number, row)
        for number, row in enumerate(rows)
        if 1 <= num_calculations(row) <= arguments.calculations and row["question"] not in shown
    ]
    chosen = sorted(fitting, key=lambda each: each[:2])[: arguments.limit]
    turns = [turn for row in examples for turn in solved(row)]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", encoding="utf-8") as file:
        for _, number, row in chosen:
            problem = [*turns, {"role": "user", "content": row["question"]}]
            name = f"{arguments.source.stem}/{number}"
            file.write(json.dumps({"id": name, "problem": problem, "answer": row["result"]}) + "\n")
    print(
        f"{arguments.output}: {len(chosen)} of {len(rows)} problems, after {len(examples)} solved examples"
    )


if __name__ == "__main__":
    main()
