"""Is an answer right, given the gold answer? Each kind of answer is compared in its own way.

Not symmetrical: a gold answer without a unit or a name is right with any, and one with a name needs
none.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from math import gcd

from spiral_mega.rewards.symbolic.answers import (
    Answer,
    Choice,
    Matrix,
    Ratio,
    Relation,
    Sequence,
    SetOperation,
    Text,
    Unread,
    Value,
)
from spiral_mega.rewards.symbolic.equality import equal, proportional
from spiral_mega.rewards.symbolic.names import is_equation, is_name, name_of, stated
from spiral_mega.rewards.symbolic.nodes import Apply, Node, Symbol, free_symbols, subtract
from spiral_mega.rewards.symbolic.quantities import same_quantity, variants
from spiral_mega.rewards.symbolic.realsets import is_inequality, real_set, same_set

_MAX_PARTS = 200


def same(gold: Answer, given: Answer) -> bool:
    """Whether `given` is right when `gold` is the right answer. What cannot be decided is not."""
    gold, given = simplified(gold), simplified(given)
    if gold == given:
        return True
    if isinstance(gold, Choice) or isinstance(given, Choice):
        return _same_choice(gold, given)
    if _is_set(gold) or _is_set(given):
        return _same_set(gold, given)
    if is_equation(gold) or is_equation(given):
        return _same_equation(gold, given)
    if isinstance(gold, Sequence) or isinstance(given, Sequence):
        return _same_sequence(_as_tuple(gold), _as_tuple(given))
    if isinstance(gold, Value) and isinstance(given, Value):
        return same_quantity(gold, given)
    if isinstance(gold, Ratio) or isinstance(given, Ratio):
        return _same_ratio(gold, given)
    if isinstance(gold, Relation) and isinstance(given, Relation):
        return gold.signs == given.signs and _all_same(gold.sides, given.sides)
    return isinstance(gold, Matrix) and isinstance(given, Matrix) and _same_matrix(gold, given)


def simplified(answer: Answer) -> Answer:
    """Write plus-minus signs out as lists, put lists within lists into one, and take a list of one as its element."""
    if isinstance(answer, Value | Relation):
        answers = tuple(_expanded(answer))
        return answers[0] if len(answers) == 1 else Sequence(answers)
    if not isinstance(answer, Sequence) or answer.opening not in ("", "\\{"):
        return answer
    items: list[Answer] = []
    for item in map(simplified, answer.items):
        items.extend(item.items if isinstance(item, Sequence) and not item.opening else (item,))
    if len(items) == 1:
        return items[0]
    return Sequence(tuple(items), answer.opening, answer.closing, answer.union)


def _expanded(answer: Value | Relation) -> Iterator[Answer]:
    """The two answers that one with plus-minus signs stands for; itself without any."""
    if isinstance(answer, Value):
        for node in variants(answer.node):
            yield Value(node, answer.unit)
    elif len(answer.sides) == 2 and answer.signs == ("=",) and isinstance(answer.sides[1], Value):
        for value in _expanded(answer.sides[1]):
            yield Relation((answer.sides[0], value), answer.signs)
    else:
        yield answer


# Choices


def _same_choice(gold: Answer, given: Answer) -> bool:
    """A letter decides if both sides have one; what stands after it must not say otherwise."""
    gold_letter, given_letter = _letter(gold), _letter(given)
    gold_content, given_content = _content(gold), _content(given)
    if gold_letter and given_letter:
        contradicts = gold_content and given_content and not same(gold_content, given_content)
        return gold_letter == given_letter and not contradicts
    return (
        gold_content is not None and given_content is not None and same(gold_content, given_content)
    )


def _letter(answer: Answer) -> str:
    if isinstance(answer, Choice):
        return answer.letter
    is_letter = (
        isinstance(answer, Value) and isinstance(answer.node, Symbol) and len(answer.node.name) == 1
    )
    return answer.node.name if is_letter else ""  # type: ignore[union-attr]


def _content(answer: Answer) -> Answer | None:
    return answer.content if isinstance(answer, Choice) else answer


# Sets of numbers: intervals, inequalities, memberships


def _is_set(answer: Answer) -> bool:
    """Whether an answer can only be a set of numbers, a condition on them, or an operation on sets."""
    if isinstance(answer, Sequence):
        return not answer.opening and bool(answer.items) and all(map(_is_set, answer.items))
    if isinstance(answer, Relation):
        return is_inequality(answer) or answer.signs == ("in",)
    return isinstance(answer, SetOperation) or (
        isinstance(answer, Unread) and answer.spelling.startswith("\\mathbb")
    )


def _same_set(gold: Answer, given: Answer) -> bool:
    gold_set, given_set = real_set(gold), real_set(given)
    if gold_set is not None and given_set is not None:
        return same_set(gold_set, given_set)
    if is_inequality(gold) and is_inequality(given):
        return _same_inequality(gold, given)  # type: ignore[arg-type]
    for left, right in ((gold, given), (given, gold)):
        if isinstance(left, Relation) and left.signs == ("in",) and not isinstance(right, Relation):
            return same(left.sides[1], right) if left is gold else same(right, left.sides[1])
    if (
        isinstance(gold, SetOperation)
        and isinstance(given, SetOperation)
        and gold.sign == given.sign
    ):
        return _all_same(gold.parts, given.parts) or (
            gold.sign != "setminus" and _unordered(gold.parts, given.parts)
        )
    if isinstance(gold, Sequence) and isinstance(given, Sequence):
        return _unordered(gold.items, given.items)
    if isinstance(gold, Relation) and isinstance(given, Relation):
        return gold.signs == given.signs and _all_same(gold.sides, given.sides)
    return False


def _same_inequality(gold: Relation, given: Relation) -> bool:
    """Two inequalities in several variables: the differences of their sides are in a positive ratio."""
    if len(gold.signs) != 1 or len(given.signs) != 1:
        return gold.signs == given.signs and _all_same(gold.sides, given.sides)
    gold_sign, gold_difference = _below_zero(gold)
    given_sign, given_difference = _below_zero(given)
    if gold_difference is None or given_difference is None or gold_sign != given_sign:
        return False
    return proportional(gold_difference, given_difference, positive=gold_sign != "ne")


def _below_zero(relation: Relation) -> tuple[str, Node | None]:
    """An inequality as one between an expression and zero: < or \\le (or \\ne), and the expression."""
    left, right = relation.sides
    if not isinstance(left, Value) or not isinstance(right, Value):
        return "", None
    name = relation.signs[0]
    if name in (">", "ge"):
        left, right, name = right, left, "<" if name == ">" else "le"
    return name, subtract(left.node, right.node)


# Equations


def _same_equation(gold: Answer, given: Answer) -> bool:
    if isinstance(gold, Relation) and isinstance(given, Relation):
        return _same_equations(gold, given)
    if isinstance(gold, Relation):
        values = [value for value in stated(gold) if _gives_name(gold) and not is_name(value)]
        return any(same(value, given) for value in values)
    assert isinstance(given, Relation)
    return any(same(gold, value) for value in stated(given))


def _gives_name(equation: Relation) -> bool:
    """Whether an equation only names a value (or, as 5 = 5, not even that), so that the value alone says the same."""
    return (
        is_name(equation.sides[0])
        or is_name(equation.sides[-1])
        or not _has_symbols(equation.sides[0])
    )


def _has_symbols(answer: Answer) -> bool:
    return not isinstance(answer, Value) or bool(free_symbols(answer.node))


def _same_equations(gold: Relation, given: Relation) -> bool:
    """The same value for the same name, or differences of both sides that are in a constant ratio."""
    if _names_agree(gold, given) and any(
        same(value, other) for value in stated(gold) for other in stated(given)
    ):
        return True
    differences = [_difference(equation) for equation in (gold, given)]
    if differences[0] is None or differences[1] is None:
        return False
    return proportional(differences[0], differences[1], positive=False)


def _names_agree(gold: Relation, given: Relation) -> bool:
    """Whether two equations name the same thing. Words name anything; numbers alone (2 + 3 = 5) need no name."""
    gold_name, given_name = name_of(gold), name_of(given)
    if gold_name is None or given_name is None:
        return not any(map(_has_symbols, (given if given_name is None else gold).sides))
    return gold_name == given_name or isinstance(gold_name, Text) or isinstance(given_name, Text)


def _difference(equation: Relation) -> Node | None:
    """Left side minus right side; None for a chain, and for sides that are no expressions."""
    left, right = equation.sides[0], equation.sides[-1]
    if len(equation.sides) != 2 or not isinstance(left, Value) or not isinstance(right, Value):
        return None
    return subtract(left.node, right.node)


# Lists, tuples, sets, vectors


def _same_sequence(gold: Answer, given: Answer) -> bool:
    if not isinstance(gold, Sequence) or not isinstance(given, Sequence):
        return False
    if len(gold.items) != len(given.items) or len(gold.items) > _MAX_PARTS:
        return False
    if gold.opening in ("(", "[", "langle") or given.opening in ("(", "[", "langle"):
        return _fits(gold, given) and _all_same(_in_order(gold), _in_order(given))
    if _all_same(gold.items, given.items):
        return True
    if _has_ellipsis(gold) or (_is_named_apart(gold) and not _is_named_apart(given)):
        return False
    return _unordered(gold.items, given.items)


def _fits(gold: Sequence, given: Sequence) -> bool:
    """Whether the brackets of two sequences, at least one of them a tuple, allow them to be the same."""
    if "\\{" in (gold.opening, given.opening):
        return False
    if not gold.opening or not given.opening or "langle" in (gold.opening, given.opening):
        return True
    same_brackets = (gold.opening, gold.closing) == (given.opening, given.closing)
    return same_brackets or len(gold.items) > 2  # two in brackets may be an interval


def _in_order(sequence: Sequence) -> tuple[Answer, ...]:
    """The elements; of equations such as y = 2, x = 1 the values in the order of their names."""
    if not _is_named_apart(sequence):
        return sequence.items
    named = sorted(sequence.items, key=lambda item: str(name_of(item)))  # type: ignore[arg-type]
    return tuple(stated(item)[0] for item in named)  # type: ignore[arg-type]


def _is_named_apart(sequence: Sequence) -> bool:
    """Whether the elements are equations that give values to different names."""
    names = []
    for item in sequence.items:
        if not isinstance(item, Relation) or not is_equation(item) or not stated(item):
            return False
        names.append(name_of(item))
    return None not in names and len(set(names)) == len(names)


def _has_ellipsis(sequence: Sequence) -> bool:
    return Unread("\\ldots") in sequence.items


def _all_same(golds: Ordered[Answer], givens: Ordered[Answer]) -> bool:
    return len(golds) == len(givens) and all(map(same, golds, givens))


def _unordered(golds: Ordered[Answer], givens: Ordered[Answer]) -> bool:
    """Whether the answers can be paired so that each pair is the same."""
    left = list(givens)
    for gold in golds:
        index = next((index for index, given in enumerate(left) if same(gold, given)), None)
        if index is None:
            return False
        left.pop(index)
    return not left


def _as_tuple(answer: Answer) -> Answer:
    """A vector as a tuple."""
    if (
        isinstance(answer, Matrix)
        and answer.environment.endswith("matrix")
        and answer.environment[0] not in "vV"
    ):
        if len(answer.rows) == 1:
            return Sequence(answer.rows[0], "langle", "rangle")
        if all(len(row) == 1 for row in answer.rows):
            return Sequence(tuple(row[0] for row in answer.rows), "langle", "rangle")
    return answer


# Ratios and matrices


def _same_ratio(gold: Answer, given: Answer) -> bool:
    if isinstance(gold, Ratio) and isinstance(given, Ratio):
        if _is_time(gold) or given.half:
            return gold.terms == given.terms and (
                not gold.half or not given.half or gold.half == given.half
            )
        return len(gold.terms) == len(given.terms) and _proportional_terms(gold.terms, given.terms)
    ratio, value = (gold, given) if isinstance(gold, Ratio) else (given, gold)
    if (
        not isinstance(ratio, Ratio)
        or not isinstance(value, Value)
        or len(ratio.terms) != 2
        or _is_time(ratio)
    ):
        return False
    quotient = Apply("div", ratio.terms)
    return equal(quotient, value.node) if ratio is gold else equal(value.node, quotient)


def _is_time(ratio: Ratio) -> bool:
    """Whether a : b is a time of day or a duration: with am or pm, or not in lowest terms, as 12:00 and 4:30."""
    if ratio.half:
        return True
    parts = ratio.literal.split(":")
    if (
        len(parts) not in (2, 3)
        or not all(part.isdecimal() for part in parts)
        or any(len(part) != 2 for part in parts[1:])
    ):
        return False
    return parts[1].startswith("0") or gcd(*map(int, parts)) != 1


def _proportional_terms(golds: tuple[Node, ...], givens: tuple[Node, ...]) -> bool:
    first, other = golds[0], givens[0]
    return all(
        equal(Apply("mul", (first, given)), Apply("mul", (other, gold)))
        for gold, given in zip(golds[1:], givens[1:], strict=True)
    )


def _same_matrix(gold: Matrix, given: Matrix) -> bool:
    if _matrix_kind(gold) != _matrix_kind(given) or len(gold.rows) != len(given.rows):
        return False
    if gold.environment == "cases":
        return _unordered(
            [Sequence(row, "(", ")") for row in gold.rows],
            [Sequence(row, "(", ")") for row in given.rows],
        )
    return all(_all_same(*rows) for rows in zip(gold.rows, given.rows, strict=True))


def _matrix_kind(matrix: Matrix) -> str:
    """Determinants, norms and definitions by cases are not matrices; all brackets around a matrix are alike."""
    return matrix.environment if matrix.environment[0] in "vVc" else "matrix"
