"""Grouped tokens to an expression, by recursive descent.

    sum      = [sign] product { sign product }
    product  = power { [* or /] power }
    power    = atom { ^script | _script | ! | ' | % | degrees }
    atom     = number | letter | word | command with its arguments | brackets around a sum

Readings that LaTeX leaves open: 1\\frac{1}{2} is a mixed number, 1/2x is half of x but a/bc is a
over bc, \\sin 2x y is the sine of all three, f(x) is a value of f, and \\sqrt12 and x^12 take the
whole number.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.functions import FunctionParser
from spiral_mega.rewards.symbolic.groups import (
    Group,
    Item,
    Items,
    is_command,
    is_group,
    is_mark,
    spell,
    split,
)
from spiral_mega.rewards.symbolic.nodes import (
    BINDERS,
    ONE,
    UNKNOWN_FUNCTION,
    Apply,
    Node,
    Number,
    Symbol,
    integer,
    is_deeper_than,
)
from spiral_mega.rewards.symbolic.symbols import differential_quotient, primed, with_subscript
from spiral_mega.rewards.symbolic.tokens import FUNCTIONS, Kind, Token
from spiral_mega.rewards.symbolic.vocabulary import vocabulary

_SIGNS = {"+": None, "-": "neg", "pm": "pm", "mp": "mp"}
_BETWEEN = {"over": "div", "choose": "binom"}
_ROUNDED = {"lvert": "abs", "lfloor": "floor", "lceil": "ceil"}
_ACCENTS = vocabulary(
    "hat vec dot ddot tilde bar overline overrightarrow wideparen acute breve check underbar"
)
_FIGURES = vocabulary("angle triangle odot measuredangle square Box parallelogram")
_ALWAYS_FUNCTIONS = frozenset("fF")
_OFTEN_FUNCTIONS = frozenset("ghGHPQpq")
_PREFIXES = ("sin", "cos", "tan", "cot", "sec", "csc", "ln", "log")
_ORDINALS = frozenset({"st", "nd", "rd", "th"})
_HUNDRED = integer(100)
_TWO = integer(2)
_MAX_DEPTH = 200


def parse_expression(items: Items) -> Node:
    """Parse grouped tokens into an expression. Raises AnswerError if they are none, or one that is nested too deep."""
    node = _parse(items)
    if is_deeper_than(node, _MAX_DEPTH):
        raise AnswerError(f"nested deeper than {_MAX_DEPTH}")
    return node


def _parse(items: Items) -> Node:
    for name, function in _BETWEEN.items():
        if any(is_command(item, name) for item in items):
            parts, _ = split(items, lambda item, name=name: is_command(item, name))  # type: ignore[misc]
            top, bottom = _two(parts)
            return Apply(function, (_parse(top), _parse(bottom)))
    parser = _Parser(items)
    node = parser.sum()
    if parser.item is not None:
        raise AnswerError(f"{spell(items)} is no expression")
    return node


class _Parser(FunctionParser):
    """A position in grouped tokens. Each method reads what it is named after and moves on."""

    def parse(self, items: Items) -> Node:
        return _parse(items)

    def sum(self) -> Node:
        """Terms with signs between them."""
        terms = [self.signed(self.product)]
        while self._is_sign():
            terms.append(self.signed(self.product))
        return terms[0] if len(terms) == 1 else Apply("add", tuple(terms))

    def product(self) -> Node:
        """Factors, with or without signs of multiplication and division between them."""
        node = self.power()
        while True:
            if self._take_operator("*", "cdot", "times"):
                node = Apply("mul", (node, self.signed(self.power)))
            elif self._take_operator("/", "div"):
                node = Apply("div", (node, self._denominator()))
            elif self._take_operator("mod"):
                node = Apply("mod", (node, self.signed(self.power)))
            elif self.starts_atom() and not self._is_number_after_number():
                node = Apply("mul", (node, self.power()))
            else:
                return node

    def power(self) -> Node:
        """An atom, and all that stands after it and applies to it."""
        node = self._atom()
        while True:
            if self.take_mark("^"):
                node = self._raised(node)
            elif self.take_mark("_"):
                node = _with_script(node, self.script_items())
            elif self.take_mark("!"):
                node = Apply("factorial2" if self.take_mark("!") else "factorial", (node,))
            elif self.take_mark("'"):
                node = primed(node)
            elif self.take_mark("%"):
                node = Apply("div", (node, _HUNDRED))
            elif self._take_operator("degree"):
                node = Apply("deg", (node,))
            else:
                return node

    def signed(self, read: Callable[[], Node]) -> Node:
        signs = []
        while self._is_sign():
            signs.append(_SIGNS[spell((self.take(),))])
        node = read()
        for sign in reversed(signs):
            node = node if sign is None else Apply(sign, (node,))
        return node

    def _is_sign(self) -> bool:
        return is_mark(self.item, "+", "-") or is_command(self.item, "pm", "mp")

    def _take_operator(self, *names: str) -> bool:
        found = is_mark(self.item, *names) or is_command(self.item, *names)
        self.at += found
        return found

    def _is_number_after_number(self) -> bool:
        pair = self.items[self.at - 1 : self.at + 1]
        return all(isinstance(item, Token) and item.kind is Kind.NUMBER for item in pair)

    def _denominator(self) -> Node:
        """What a slash divides by: a number alone, but letters with the letters that follow them directly."""
        first = self.item
        node = self.signed(self.power)
        while (
            isinstance(first, Token)
            and first.kind is not Kind.NUMBER
            and self._is_letter_directly_after()
        ):
            node = Apply("mul", (node, self.power()))
        return node

    def _is_letter_directly_after(self) -> bool:
        item = self.item
        if (
            not isinstance(item, Token)
            or item.spaced
            or item.kind not in (Kind.LETTERS, Kind.COMMAND)
        ):
            return False
        return self.starts_atom() and item.text not in FUNCTIONS

    def _raised(self, node: Node) -> Node:
        """A power; or degrees, primes or an ordinal's ending, which are written as exponents."""
        items = self.script_items()
        if all(is_command(item, "circ") for item in items):
            return Apply("deg", (node,))
        if all(is_mark(item, "'") for item in items):
            for _ in items:
                node = primed(node)
            return node
        if isinstance(node, Number) and spell(items) in _ORDINALS:
            return node
        exponent = _parse(items)
        if self.take_mark("^"):  # a^b^c is a^(b^c)
            exponent = self._raised(exponent)
        chosen = node.name.removeprefix("C_") if isinstance(node, Symbol) else ""
        if chosen.isdecimal() and isinstance(exponent, Number):
            return Apply("binom", (integer(int(chosen)), exponent))
        return Apply("exp", (exponent,)) if node == Symbol("e") else Apply("pow", (node, exponent))

    # Atoms

    def _atom(self) -> Node:
        if not self.starts_atom():
            raise AnswerError("an operand is missing")
        item = self.take()
        if isinstance(item, Group):
            return _bracketed(item)
        if item.kind is Kind.NUMBER:
            return self._number(item)
        if item.kind is Kind.LETTERS:
            return self._letters(item)
        if item.kind is Kind.WORD:
            return Symbol(item.text)
        if item.kind is Kind.COMMAND:
            return self._command(item.text)
        return self._absolute_value()

    def _number(self, token: Token) -> Node:
        """A number, or a mixed number: an integer directly before a proper fraction of integers."""
        assert token.value is not None
        number = Number(token.value, token.places)
        if token.places is not None or token.value.denominator != 1:
            return number
        start = self.at
        fraction = self._fraction_of_integers()
        if fraction is not None and 0 < fraction < 1:
            return Number(token.value + fraction)
        self.at = start
        return number

    def _fraction_of_integers(self) -> Fraction | None:
        """The value of \\frac{1}{2}, or of 1/2 after a space."""
        if self._take_operator("frac"):
            top, bottom = _parse(self.argument_items()), _parse(self.argument_items())
            integers = isinstance(top, Number) and isinstance(bottom, Number)
            return top.value / bottom.value if integers and bottom.value else None  # type: ignore[union-attr]
        following = self.items[self.at : self.at + 3]
        if len(following) < 3 or not is_mark(following[1], "/"):
            return None
        numerator, denominator = following[0], following[2]
        if (
            not isinstance(numerator, Token)
            or not isinstance(denominator, Token)
            or not numerator.spaced
        ):
            return None
        if numerator.value is None or not denominator.value:
            return None
        self.at += 3
        return numerator.value / denominator.value

    def _letters(self, token: Token) -> Node:
        """The first letter of a run of letters, or a function that is written without its backslash."""
        run = token.text
        if run in FUNCTIONS:
            return self.function(run)
        if run == "pi":
            return Symbol("pi")
        for name in _PREFIXES:
            if run.startswith(name) and len(run) == len(name) + 1:  # sinx
                self.divide(token, len(name))
                return self.function(name)
        if len(run) > 1:
            self.divide(token, 1)
        return self._letter(run[0])

    def _letter(self, letter: str) -> Node:
        """A variable, or the value of an unknown function: f'(x)."""
        start = self.at
        primes = self._primes()
        argument = self.item
        if isinstance(argument, Group) and argument.opening == "(" and argument.closing == ")":
            lone = len(argument.items) == 1 and isinstance(argument.items[0], Token)
            known = (
                letter in _ALWAYS_FUNCTIONS or (letter in _OFTEN_FUNCTIONS and lone) or bool(primes)
            )
            if known or any(is_mark(item, ",") for item in argument.items):
                self.at += 1
                return Apply(f"{UNKNOWN_FUNCTION}{letter}{primes}", self.arguments_in(argument))
        self.at = start
        return Symbol(letter)

    def _primes(self) -> str:
        """The primes that follow, written as ' or as a script."""
        primes = ""
        while self.take_mark("'"):
            primes += "'"
        following = self.items[self.at : self.at + 2]
        if not primes and len(following) == 2 and is_mark(following[0], "^"):
            script = following[1].items if isinstance(following[1], Group) else (following[1],)
            if script and all(is_mark(item, "'") for item in script):
                self.at += 2
                return "'" * len(script)
        return primes

    def _absolute_value(self) -> Node:
        """From after a bar to the next one."""
        start = self.at
        while not self.take_mark("|"):
            self.take()
        return Apply("abs", (_parse(tuple(self.items[start : self.at - 1])),))

    # Commands

    def _command(self, name: str) -> Node:
        if name in FUNCTIONS and name != "sqrt":
            return self.function(name)
        if name in BINDERS:
            return self.with_bounds(name)
        if name == "frac":
            return self._fraction()
        if name == "sqrt":
            return self._root()
        if name == "binom":
            return Apply("binom", (_parse(self.argument_items()), _parse(self.argument_items())))
        if name in _ACCENTS:
            return _accented(name, self.argument_items())
        return self._figure(name) if name in _FIGURES else Symbol(name)

    def _fraction(self) -> Node:
        top, bottom = self.argument_items(), self.argument_items()
        quotient = differential_quotient(top, bottom)
        return quotient or Apply("div", (_parse(top), _parse(bottom)))

    def _root(self) -> Node:
        degree: Node = _TWO
        if is_group(self.item, "["):
            degree = _bracketed(self.take())  # type: ignore[arg-type]  # a group
        return Apply("root", (_parse(self.argument_items(whole_number=True)), degree))

    def _figure(self, name: str) -> Node:
        """An angle, triangle or the like: the sign with the letters that follow are one name."""
        letters: list[Item] = []
        while self._continues_name(self.item, first=not letters):
            letters.append(self.take())
            if is_mark(letters[-1], "_"):
                letters.extend(self.script_items())
        return Symbol(f"{name} {spell(tuple(letters))}")

    def _continues_name(self, item: Item | None, first: bool) -> bool:
        if isinstance(item, Group):
            return first and item.opening == "{"
        return isinstance(item, Token) and (item.kind is Kind.LETTERS or is_mark(item, "_", "'"))


def _bracketed(brackets: Group) -> Node:
    """The expression within brackets. Raises AnswerError for a list, a set or an environment."""
    opening, closing, inner = brackets
    if (opening, closing) in (("(", ")"), ("[", "]"), ("{", "}")):
        return _parse(inner) if inner or opening != "{" else ONE
    if opening in _ROUNDED:
        return Apply(_ROUNDED[opening], (_parse(inner),))
    raise AnswerError(f"{opening} in an expression")


def _with_script(node: Node, items: Items) -> Node:
    """A symbol with a subscript in its name, or a number in a base."""
    if isinstance(node, Symbol):
        return with_subscript(node, items)
    if isinstance(node, Number):
        return Apply("base", (node, _parse(items)))
    if node.function == "pow" and isinstance(node.arguments[0], Symbol):  # x^2_1
        return Apply("pow", (with_subscript(node.arguments[0], items), node.arguments[1]))
    raise AnswerError("a subscript to an expression")


def _accented(name: str, items: Items) -> Node:
    """A symbol with an accent. A bar over numbers is conjugation, over several capitals a segment: their product."""
    spelt = spell(items)
    if name in ("bar", "overline"):
        if len(spelt) > 1 and spelt.isalpha() and spelt.isupper():
            return _parse(items)
        if any(character.isdecimal() for character in spelt) and not spelt.isdecimal():
            return Apply("conj", (_parse(items),))
        name = "bar"
    return Symbol(f"{name} {spelt}")


def _two(parts: list[Items]) -> tuple[Items, Items]:
    if len(parts) != 2:
        raise AnswerError("two fractions in one group")
    return parts[0], parts[1]
