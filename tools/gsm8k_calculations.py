"""The calculations inside GSM8K's worked solutions as problems of their own, for models too weak for whole problems.

A solution marks each calculation, as in "48/2 = <<48/2=24>>24"; that becomes the problem "What is 48 / 2?". Kept are
those of two whole numbers whose result is a whole number too, each once. Each problem comes with three solved examples
as earlier turns of the chat, which show the form of an answer better than an instruction does.

    python tools/gsm8k_calculations.py --source configs/data/gsm8k/train.jsonl --output calculations.jsonl
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = (("3 * 4", 12), ("20 - 6", 14), ("30 / 5", 6))
CALCULATION = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>")


def calculations(solutions: Iterator[str]) -> dict[str, str]:
    """Result by calculation, in the order of the solutions."""
    return {
        f"{left} {operator} {right}": result
        for solution in solutions
        for left, operator, right, result in CALCULATION.findall(solution)
    }


def problem(calculation: str) -> list[dict[str, str]]:
    """The chat that asks for a calculation."""
    messages = []
    for example, result in EXAMPLES:
        messages.append({"role": "user", "content": f"What is {example}?"})
        messages.append({"role": "assistant", "content": f"{example} = \\boxed{{{result}}}"})
    return [*messages, {"role": "user", "content": f"What is {calculation}?"}]


def read_solutions(path: Path) -> Iterator[str]:
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["answer"]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: {path} is not GSM8K as JSON lines with an answer ({error!r}): correct --source")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="GSM8K as JSON lines")
    parser.add_argument("--without", type=Path, help="GSM8K file whose calculations are left out, such as the test set")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="write the first so many only")
    arguments = parser.parse_args()

    found = calculations(read_solutions(arguments.source))
    known = set(calculations(read_solutions(arguments.without)) if arguments.without else {})
    known |= {example for example, _ in EXAMPLES}
    kept = [calculation for calculation in found if calculation not in known][: arguments.limit]
    rows = [{"id": each, "problem": problem(each), "answer": found[each]} for each in kept]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{arguments.output}: {len(rows)} of {len(found)} calculations")


if __name__ == "__main__":
    main()
