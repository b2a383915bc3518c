"""Sets of real numbers, as unions of intervals: from intervals, inequalities, memberships and operations on these."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cmp_to_key, reduce
from typing import NamedTuple

from spiral_mega.rewards.symbolic.answers import (
    Answer,
    Relation,
    Sequence,
    SetOperation,
    Unread,
    Value,
)
from spiral_mega.rewards.symbolic.equality import equal, sign
from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.nodes import (
    INFINITY,
    NEGATIVE_INFINITY,
    ONE,
    ZERO,
    Apply,
    Node,
    Number,
    Symbol,
    free_symbols,
    integer,
    substitute,
    subtract,
)

_FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le", "ne": "ne"}
_REALS = frozenset({"\\mathbb R", "\\mathbbR"})
_MAX_PIECES = 32


class Interval(NamedTuple):
    """The numbers from `low` to `high`, which are expressions or infinite."""

    low: Node
    high: Node
    has_low: bool = False
    has_high: bool = False


class RealSet(NamedTuple):
    """A union of intervals in ascending order, none touching the next; the variable it is said of, or ""."""

    pieces: tuple[Interval, ...]
    variable: str = ""


EVERYTHING = RealSet((Interval(NEGATIVE_INFINITY, INFINITY),))


def is_inequality(answer: Answer) -> bool:
    """Whether an answer is a chain of <, >, \\le, \\ge and \\ne."""
    return isinstance(answer, Relation) and all(name in _FLIPPED for name in answer.signs)


def real_set(answer: Answer) -> RealSet | None:
    """The set of real numbers that an answer stands for; None if it stands for none."""
    try:
        return _real_set(answer)
    except AnswerError:
        return None


def same_set(gold: RealSet, given: RealSet) -> bool:
    """Whether two sets are the same. Said of variables, these have to be the same one."""
    if gold.variable and given.variable and gold.variable != given.variable:
        return False
    if len(gold.pieces) != len(given.pieces):
        return False
    return all(_same_interval(*pair) for pair in zip(gold.pieces, given.pieces, strict=True))


def _same_interval(gold: Interval, given: Interval) -> bool:
    closed = (gold.has_low, gold.has_high) == (given.has_low, given.has_high)
    return closed and equal(gold.low, given.low) and equal(gold.high, given.high)


def _real_set(answer: Answer) -> RealSet:
    if isinstance(answer, Unread) and answer.spelling in _REALS:
        return EVERYTHING
    if isinstance(answer, Relation):
        return _solutions(answer)
    if isinstance(answer, SetOperation):
        return _operation(answer.sign, [_real_set(part) for part in answer.parts])
    if isinstance(answer, Sequence):
        return _sequence(answer)
    raise AnswerError("no set of real numbers")


def _sequence(sequence: Sequence) -> RealSet:
    """An interval, a finite set, or several inequalities at once."""
    if sequence.opening in ("(", "[") and len(sequence.items) == 2:
        low, high = map(_node, sequence.items)
        return _ordered([_interval(low, high, sequence.opening == "[", sequence.closing == "]")])
    if sequence.opening == "\\{":
        points = map(_node, sequence.items)
        return _ordered([Interval(point, point, True, True) for point in points])
    if sequence.opening or not sequence.items:
        raise AnswerError("no set of real numbers")
    sets = [_real_set(item) for item in sequence.items]
    if len({each.variable for each in sets}) > 1:
        raise AnswerError("conditions on several variables")
    if sequence.union:
        return _operation("cup", sets)
    both = _operation("cap", sets)
    return both if both.pieces else _operation("cup", sets)  # "x < 1, x > 2" lists the pieces


def _node(answer: Answer) -> Node:
    if not isinstance(answer, Value):
        raise AnswerError("an end of an interval is no number")
    return answer.node


def _interval(low: Node, high: Node, has_low: bool, has_high: bool) -> Interval:
    return Interval(low, high, has_low and low != NEGATIVE_INFINITY, has_high and high != INFINITY)


# Inequalities


def _solutions(relation: Relation) -> RealSet:
    """The solutions of x in S, or of a chain of inequalities that are linear in one variable."""
    if relation.signs == ("in",):
        inner = _real_set(relation.sides[1])
        return RealSet(inner.pieces, _variable(_node(relation.sides[0])))
    if not is_inequality(relation):
        raise AnswerError("no inequality")
    sides = [_node(side) for side in relation.sides]
    if len(sides) == 3 and isinstance(sides[1], Symbol):
        return _between(sides, relation.signs)
    links = zip(sides, relation.signs, sides[1:], strict=False)
    return _operation("cap", [_solve(left, name, right) for left, name, right in links])


def _between(sides: list[Node], signs: tuple[str, ...]) -> RealSet:
    """a < x < b, whose ends may be any expressions."""
    low, middle, high = sides
    if all(name in (">", "ge") for name in signs):
        low, high, signs = high, low, tuple(_FLIPPED[name] for name in reversed(signs))
    if not all(name in ("<", "le") for name in signs) or not isinstance(middle, Symbol):
        raise AnswerError("a chain of inequalities that changes its direction")
    piece = _interval(low, high, signs[0] == "le", signs[1] == "le")
    return RealSet((piece,), middle.name)


def _variable(node: Node) -> str:
    if not isinstance(node, Symbol):
        raise AnswerError("no variable")
    return node.name


def _solve(left: Node, name: str, right: Node) -> RealSet:
    """The solutions of left < right (or another sign), linear in one variable, or with its absolute value."""
    for here, there, sign_name in ((left, right, name), (right, left, _FLIPPED[name])):
        if isinstance(here, Apply) and here.function == "abs" and not free_symbols(there):
            inner, negative = here.arguments[0], Apply("neg", (there,))
            halves = [_solve(inner, sign_name, there), _solve(inner, _FLIPPED[sign_name], negative)]
            return _operation("cup" if sign_name in (">", "ge") else "cap", halves)
    difference = subtract(left, right)
    names = free_symbols(difference)
    if len(names) != 1:
        raise AnswerError("an inequality in several variables")
    (variable,) = names
    root, slope = _linear(difference, variable)
    return RealSet(_half_line(root, name if slope > 0 else _FLIPPED[name]), variable)


def _linear(node: Node, variable: str) -> tuple[Node, int]:
    """The root, and the sign of the slope, of an expression that is linear in `variable`."""

    def at(value: Node) -> Node:
        return substitute(node, {variable: value})

    start, slope = at(ZERO), subtract(at(ONE), at(ZERO))
    for point in (integer(2), integer(-3), Number(Fraction(5, 7))):
        if not equal(at(point), Apply("add", (start, Apply("mul", (point, slope))))):
            raise AnswerError("an inequality that is not linear")
    direction = sign(slope)
    if direction == 0:
        raise AnswerError("an inequality without its variable")
    return Apply("div", (Apply("neg", (start,)), slope)), direction


def _half_line(end: Node, name: str) -> tuple[Interval, ...]:
    below, above = Interval(NEGATIVE_INFINITY, end), Interval(end, INFINITY)
    if name == "ne":
        return (below, above)
    if name in ("<", "le"):
        return (below._replace(has_high=name == "le"),)
    return (above._replace(has_low=name == "ge"),)


# Operations


def _operation(name: str, sets: list[RealSet]) -> RealSet:
    variable = next((each.variable for each in sets if each.variable), "")
    if sum(len(each.pieces) for each in sets) > _MAX_PIECES:
        raise AnswerError("too many intervals")
    operations: dict[str, Callable[[RealSet, RealSet], RealSet]] = {
        "cup": lambda first, second: _ordered([*first.pieces, *second.pieces]),
        "cap": _intersection,
        "setminus": lambda first, second: _intersection(first, _complement(second)),
    }
    return RealSet(reduce(operations[name], sets).pieces, variable)


def _intersection(first: RealSet, second: RealSet) -> RealSet:
    pieces = []
    for one in first.pieces:
        for other in second.pieces:
            low, has_low = _later((one.low, one.has_low), (other.low, other.has_low))
            high, has_high = _earlier((one.high, one.has_high), (other.high, other.has_high))
            order = _compare(low, high)
            if order < 0 or (order == 0 and has_low and has_high):
                pieces.append(Interval(low, high, has_low, has_high))
    return _ordered(pieces)


def _complement(real: RealSet) -> RealSet:
    pieces = []
    low: Node = NEGATIVE_INFINITY
    has_low = False
    for piece in real.pieces:
        if piece.low != NEGATIVE_INFINITY:
            pieces.append(Interval(low, piece.low, has_low, not piece.has_low))
        low, has_low = piece.high, not piece.has_high
    if low != INFINITY:
        pieces.append(Interval(low, INFINITY, has_low, False))
    return RealSet(tuple(pieces))


def _ordered(pieces: list[Interval]) -> RealSet:
    """Pieces in ascending order; those that touch or overlap are joined."""
    if len(pieces) < 2:
        return RealSet(tuple(pieces))
    joined: list[Interval] = []
    for piece in sorted(pieces, key=cmp_to_key(_compare_beginnings)):
        last = joined[-1] if joined else None
        if last is not None and _touch(last, piece):
            low_closed = last.has_low or (piece.has_low and _compare(last.low, piece.low) == 0)
            high, has_high = _later(
                (last.high, last.has_high), (piece.high, piece.has_high), closed_wins=True
            )
            joined[-1] = Interval(last.low, high, low_closed, has_high)
        else:
            joined.append(piece)
    return RealSet(tuple(joined))


def _compare_beginnings(first: Interval, second: Interval) -> int:
    return _compare(first.low, second.low)


def _touch(first: Interval, second: Interval) -> bool:
    order = _compare(second.low, first.high)
    return order < 0 or (order == 0 and (first.has_high or second.has_low))


def _later(
    one: tuple[Node, bool], other: tuple[Node, bool], closed_wins: bool = False
) -> tuple[Node, bool]:
    order = _compare(one[0], other[0])
    if order == 0:
        return one[0], (one[1] or other[1]) if closed_wins else (one[1] and other[1])
    return one if order > 0 else other


def _earlier(one: tuple[Node, bool], other: tuple[Node, bool]) -> tuple[Node, bool]:
    order = _compare(one[0], other[0])
    if order == 0:
        return one[0], one[1] and other[1]
    return one if order < 0 else other


def _compare(first: Node, second: Node) -> int:
    """-1, 0 or 1 as first is below, equal to or above second."""
    if first == second:
        return 0
    if NEGATIVE_INFINITY in (first, second) or INFINITY in (first, second):
        return -1 if first == NEGATIVE_INFINITY or second == INFINITY else 1
    return sign(subtract(first, second))
