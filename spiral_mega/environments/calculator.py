"""A calculator: replies to a turn that ends in <calc>2 * (3 + 4)</calc> with the value.

The value is exact if it is short. The calculator knows numbers, + - * / and parentheses. To
anything else it replies with the error, so that the model can fix it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from spiral_mega.traces import Problem

MAX_CHARS = 200  # bounds the work: without powers, digits grow no faster than the text
LARGEST = 10**60
_CALL = re.compile(r"<calc>((?:(?!</?calc>).)*)</calc>\s*\Z", re.DOTALL)
_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def reply(problem: Problem, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the value of the last turn's call as a tool message; [] if there is no call."""
    call = _CALL.search(messages[-1]["content"])
    return [{"role": "tool", "content": calculate(call[1])}] if call else []


def calculate(text: str) -> str:
    """Return the value of an arithmetic expression, or an error.

    An integer, else a decimal of at most 12 digits.
    """
    if len(text) > MAX_CHARS:
        return f"error: longer than {MAX_CHARS} characters"
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not an arithmetic expression"
    if abs(value) > LARGEST:
        return "error: too large"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("not arithmetic")
