"""Functions and operators with bounds, as they are written in LaTeX.

\\sin^2 2x   \\tan^{-1}(x)   \\log_2 8   \\max(a, b)   \\sum_{k=1}^{n} k   \\int_0^1 x dx   \\lim_{x \\to 0}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from spiral_mega.rewards.symbolic.cursor import Cursor
from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.groups import (
    Group,
    Item,
    Items,
    is_command,
    is_mark,
    spell,
    split,
)
from spiral_mega.rewards.symbolic.nodes import BINDERS, ONE, Apply, Node, Symbol, integer
from spiral_mega.rewards.symbolic.tokens import FUNCTIONS, Kind, Token

_INVERSE = {name: f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
_TWO = integer(2)
_TEN = integer(10)


class FunctionParser(Cursor, ABC):
    """The part of a parser that reads functions, with what it needs of the whole."""

    @abstractmethod
    def parse(self, items: Items) -> Node:
        """The expression that other items are."""

    @abstractmethod
    def product(self) -> Node:
        """The product that comes next."""

    @abstractmethod
    def power(self) -> Node:
        """The atom that comes next, with its scripts."""

    @abstractmethod
    def signed(self, read: Callable[[], Node]) -> Node:
        """What `read` reads, with the signs before it applied."""

    def function(self, name: str) -> Node:
        """A function's value, from after its name."""
        base, exponent = self._scripts()
        if name == "sqrt":
            return Apply("root", (self.parse(self.argument_items(whole_number=True)), _TWO))
        arguments = self._arguments()
        if name in _INVERSE and exponent == Apply("neg", (ONE,)):
            return Apply(_INVERSE[name], arguments)
        if name in ("log", "lg"):
            name, arguments = "log", (*arguments, base or _TEN)
        node = Apply(name, arguments)
        return node if exponent is None else Apply("pow", (node, exponent))

    def arguments_in(self, brackets: Group) -> tuple[Node, ...]:
        """The arguments within brackets, between commas."""
        parts, _ = split(brackets.items, lambda item: is_mark(item, ","))
        return tuple(map(self.parse, parts))

    def with_bounds(self, name: str) -> Node:
        """A sum, product, integral or limit, from after its sign. Sums and products take all that is multiplied."""
        scripts = dict(self._raw_scripts())
        low, high = scripts.get("_", ()), scripts.get("^", ())
        if name == "int":
            return self._integral(low, high)
        separator = is_command if name == "lim" else is_mark
        parts, signs = split(low, lambda item: separator(item, "to" if name == "lim" else "="))
        if len(signs) != 1:
            raise AnswerError(f"{name} without a variable")
        variable, start = map(self.parse, parts)
        if not isinstance(variable, Symbol):
            raise AnswerError(f"{name} over no variable")
        bounds = (start,) if name == "lim" else (start, self.parse(high))
        return Apply(name, (self.product(), variable, *bounds))

    def _scripts(self) -> tuple[Node | None, Node | None]:
        """The base and the exponent between a function and its argument, as in \\log_2 x and \\sin^2 x."""
        scripts = {mark: self.parse(items) for mark, items in self._raw_scripts()}
        return scripts.get("_"), scripts.get("^")

    def _raw_scripts(self) -> list[tuple[str, Items]]:
        scripts = []
        while is_mark(self.item, "_", "^"):
            mark = "_" if is_mark(self.take(), "_") else "^"
            scripts.append((mark, self.script_items()))
        return scripts

    def _arguments(self) -> tuple[Node, ...]:
        item = self.item
        if isinstance(item, Group) and item.opening in ("(", "["):
            self.at += 1
            return self.arguments_in(item)
        return (self.signed(self._bare_argument),)

    def _bare_argument(self) -> Node:
        """A function's argument without parentheses: one factor, and the letters that follow it."""
        node = self.power()
        while self._is_letter():
            node = Apply("mul", (node, self.power()))
        return node

    def _is_letter(self) -> bool:
        item = self.item
        if (
            not isinstance(item, Token)
            or item.kind not in (Kind.LETTERS, Kind.COMMAND)
            or not self.starts_atom()
        ):
            return False
        return (
            item.text not in FUNCTIONS
            and item.text not in BINDERS
            and item.text not in ("frac", "sqrt", "binom")
        )

    def _integral(self, low: Items, high: Items) -> Node:
        """The integrand up to dx. Raises AnswerError for an integral without bounds."""
        body: list[Item] = []
        while self.item is not None:
            item = self.take()
            variable = self._variable_of_differential(item)
            if variable:
                body.extend(_before_differential(item))
                integrand = self.parse(tuple(body)) if body else ONE
                return Apply(
                    "int", (integrand, Symbol(variable), self.parse(low), self.parse(high))
                )
            body.append(item)
        raise AnswerError("an integral without a variable")

    def _variable_of_differential(self, item: Item) -> str:
        """The letter after d in letters that end with dx, or that end with d before another letter; else ""."""
        if not isinstance(item, Token) or item.kind is not Kind.LETTERS or "d" not in item.text:
            return ""
        after = item.text.rpartition("d")[2]
        following = self.item
        if (
            not after
            and isinstance(following, Token)
            and following.kind is Kind.LETTERS
            and len(following.text) == 1
        ):
            self.at += 1
            return following.text
        return after if len(after) == 1 else ""


def _before_differential(item: Item) -> Items:
    """The letters before dx in a run of letters, as in x dx."""
    before = spell((item,)).rpartition("d")[0]
    return (Token(Kind.LETTERS, before),) if before else ()
