"""Names of symbols: subscripts, primes, accents and differentials are part of them."""

from __future__ import annotations

from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.groups import Items, is_mark, spell
from spiral_mega.rewards.symbolic.nodes import Apply, Node, Number, Symbol
from spiral_mega.rewards.symbolic.tokens import Kind, Token

_MAX_SUBSCRIPT = 40


def primed(node: Node) -> Node:
    """A symbol with one prime more, or a number of minutes (with two primes, seconds) of arc."""
    if isinstance(node, Symbol):
        return Symbol(node.name + "'")
    if isinstance(node, Number):
        return Apply("minutes", (node,))
    if node.function == "minutes":
        return Apply("seconds", node.arguments)
    raise AnswerError("a prime after an expression")


def with_subscript(symbol: Symbol, items: Items) -> Symbol:
    """A symbol with a subscript in its name: v_{max}, however it is set, is v_max."""
    return Symbol(f"{symbol.name}_{spell(items)[:_MAX_SUBSCRIPT]}")


def differential_quotient(top: Items, bottom: Items) -> Symbol | None:
    """The symbol dy/dx for a fraction of differentials, which is no quotient of products; None for other fractions."""
    if _is_differential(top, of_derivative=True) and _is_differential(bottom, of_derivative=False):
        return Symbol(f"{spell(top)}/{spell(bottom)}")
    return None


def _is_differential(items: Items, of_derivative: bool) -> bool:
    """Whether items are dx, or, above the line of a derivative, d, df or d^2 f."""
    if not items or not isinstance(items[0], Token):
        return False
    first = items[0]
    if first.kind is Kind.COMMAND and first.text == "partial":
        return of_derivative or len(items) > 1
    if first.kind is not Kind.LETTERS or not first.text.startswith("d"):
        return False
    second = items[1] if len(items) > 1 else None
    followed = isinstance(second, Token) and second.kind in (Kind.LETTERS, Kind.COMMAND)
    return (
        len(first.text) > 1
        or followed
        or (of_derivative and (second is None or is_mark(second, "^")))
    )
