"""Lines that a person would write: no comprehension inside a comprehension, few lines past 100 characters."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "spiral_mega"
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LONG_LINE = 100
MAX_LONG_LINES = 0.05  # share of the package's lines


def nested_comprehensions(tree: ast.AST, inside: bool = False) -> int:
    """Count the comprehensions that stand inside another one."""
    count = 0
    for node in ast.iter_child_nodes(tree):
        comprehension = isinstance(node, COMPREHENSIONS)
        count += comprehension and inside
        count += nested_comprehensions(node, inside or comprehension)
    return count


def test_no_comprehension_is_nested():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        count = nested_comprehensions(ast.parse(path.read_text()))
        if count:
            found[name] = count
    assert found == {}


def test_few_lines_are_long():
    lines = [line for path in PACKAGE.rglob("*.py") for line in path.read_text().splitlines()]
    assert sum(len(line) > LONG_LINE for line in lines) <= MAX_LONG_LINES * len(lines)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("[x for x in y]", 0),
        ("[x for x in y for y in z]", 0),
        ("[[x for x in y] for y in z]", 1),
        ("sum(x for x in [y for y in z])", 1),
        ("{k: [f(x) for x in {y for y in k}] for k in z}", 2),
    ],
)
def test_nested_comprehensions_are_counted(source: str, count: int) -> None:
    assert nested_comprehensions(ast.parse(source)) == count
