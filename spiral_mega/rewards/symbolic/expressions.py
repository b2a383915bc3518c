"""Grouped tokens to an expression, by recursive descent.

    sum      = [sign] product { sign product }
    product  = power { [* or /] power }
    power    = atom { ^script | _script | ! | ' | % | degrees }
    atom     = number | letter | word | command with its arguments | brackets around a sum

Readings that LaTeX leaves open: 1\\frac{1}{2} is a mixed number, 1/2x is half of x but a/bc is a over bc,
\\sin 2x y is the sine of all three, f(x) is a value of f, and \\sqrt12 and x^12 take the whole number.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.groups import Group, Item, Items, is_command, is_group, is_mark, spell, split
from spiral_mega.rewards.symbolic.nodes import (
    ONE,
    UNKNOWN_FUNCTION,
    Apply,
    Node,
    Number,
    Symbol,
    integer,
)
from spiral_mega.rewards.symbolic.tokens import FUNCTIONS, Kind, Token

_SIGNS = {"+": None, "-": "neg", "pm": "pm", "mp": "mp"}
_TIMES = ("cdot", "times", "*")
_OVER = ("/", "div")
_NOT_ATOMS = frozenset(
    "times cdot div pm mp le ge ne approx equiv in notin cup cap setminus to land lor sim cong mod pmod perp parallel "
    "implies Rightarrow Leftrightarrow iff subset subseteq ldots circ degree therefore because ni propto over choose "
    "ll gg models vdash mid quad begin end varnothing".split()
)
_ACCENTS = frozenset("hat vec dot ddot tilde bar overline overrightarrow wideparen acute breve check underbar".split())
_FIGURES = frozenset("angle triangle odot measuredangle square Box parallelogram".split())
_BIG_OPERATORS = {"sum": "sum", "prod": "prod", "int": "int", "lim": "lim"}
_ARC = {name: f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
_ALWAYS_FUNCTIONS = frozenset("fF")
_OFTEN_FUNCTIONS = frozenset("ghGHPQpq")
_PREFIXED = ("sin", "cos", "tan", "cot", "sec", "csc", "ln", "log")
_ORDINALS = frozenset({"st", "nd", "rd", "th"})
_HUNDRED = integer(100)
_TWO = integer(2)
_MAX_SUBSCRIPT = 40


def parse_expression(items: Items) -> Node:
    """The expression that grouped tokens are. Raises AnswerError if they are none."""
    for name in ("over", "choose"):
        parts, found = split(items, lambda item, name=name: is_command(item, name))  # type: ignore[misc]
        if len(found) == 1:
            top, bottom = map(parse_expression, parts)
            return Apply("div" if name == "over" else "binom", (top, bottom))
    parser = _Parser(items)
    node = parser.sum()
    if parser.item is not None:
        raise AnswerError(f"{spell(items)} is no expression")
    return node


class _Parser:
    """A position in grouped tokens. Each method reads what it is named after and moves on."""

    def __init__(self, items: Items) -> None:
        self._items = list(items)
        self._at = 0

    @property
    def item(self) -> Item | None:
        """The next item; None at the end."""
        return self._items[self._at] if self._at < len(self._items) else None

    def sum(self) -> Node:
        """Terms with signs between them."""
        terms = [self._signed(self.product)]
        while self._is_sign():
            terms.append(self._signed(self.product))
        return terms[0] if len(terms) == 1 else Apply("add", tuple(terms))

    def product(self) -> Node:
        """Factors, with or without signs of multiplication and division between them."""
        node = self._power()
        while True:
            if is_mark(self.item, "*") or is_command(self.item, *_TIMES):
                self._at += 1
                node = Apply("mul", (node, self._signed(self._power)))
            elif is_mark(self.item, "/") or is_command(self.item, *_OVER):
                self._at += 1
                node = Apply("div", (node, self._denominator()))
            elif is_command(self.item, "mod"):
                self._at += 1
                node = Apply("mod", (node, self._signed(self._power)))
            elif self._starts_atom() and not self._is_number_after_number():
                node = Apply("mul", (node, self._power()))
            else:
                return node

    def _is_number_after_number(self) -> bool:
        pair = self._items[self._at - 1 : self._at + 1]
        return all(isinstance(item, Token) and item.kind is Kind.NUMBER for item in pair)

    # Signs and scripts

    def _is_sign(self) -> bool:
        return is_mark(self.item, "+", "-") or is_command(self.item, "pm", "mp")

    def _signed(self, read: Callable[[], Node]) -> Node:
        """What `read` reads, with the signs before it applied."""
        signs = []
        while self._is_sign():
            signs.append(_SIGNS[self._take().text])  # type: ignore[union-attr]  # a sign is a token
        node = read()
        for sign in reversed(signs):
            node = node if sign is None else Apply(sign, (node,))
        return node

    def _denominator(self) -> Node:
        """What a slash divides by: a number alone, but letters with the letters that follow them directly."""
        start = self._at
        node = self._signed(self._power)
        first = self._items[start]
        while isinstance(first, Token) and first.kind is not Kind.NUMBER and self._is_letter_directly_after():
            node = Apply("mul", (node, self._power()))
        return node

    def _is_letter_directly_after(self) -> bool:
        item = self.item
        letter = isinstance(item, Token) and item.kind in (Kind.LETTERS, Kind.COMMAND) and self._starts_atom()
        return letter and not item.spaced and not is_command(item, *FUNCTIONS)  # type: ignore[union-attr]

    def _power(self) -> Node:
        node = self._atom()
        while True:
            if is_mark(self.item, "^"):
                self._at += 1
                node = self._raised(node)
            elif is_mark(self.item, "_"):
                self._at += 1
                node = _with_subscript(node, self._script_items())
            elif is_mark(self.item, "!"):
                node = self._factorial(node)
            elif is_mark(self.item, "'"):
                self._at += 1
                node = _primed(node)
            elif is_mark(self.item, "%"):
                self._at += 1
                node = Apply("div", (node, _HUNDRED))
            elif is_command(self.item, "degree"):
                self._at += 1
                node = Apply("deg", (node,))
            else:
                return node

    def _raised(self, node: Node) -> Node:
        items = self._script_items()
        if all(is_command(item, "circ") for item in items):
            return Apply("deg", (node,))
        if all(is_mark(item, "'") for item in items):
            for _ in items:
                node = _primed(node)
            return node
        if len(items) == 1 and spell(items) in _ORDINALS and isinstance(node, Number):
            return node
        exponent = parse_expression(items)
        if is_mark(self.item, "^"):  # a^b^c is a^(b^c)
            self._at += 1
            exponent = self._raised(exponent)
        chosen = isinstance(node, Symbol) and node.name.startswith("C_") and node.name[2:].isdecimal()
        if chosen and isinstance(exponent, Number):
            return Apply("binom", (integer(int(node.name[2:])), exponent))  # type: ignore[union-attr]
        return Apply("exp", (exponent,)) if node == Symbol("e") else Apply("pow", (node, exponent))

    def _script_items(self) -> Items:
        """What a ^ or _ applies to: a group, or one sign, letter, number or command with its arguments."""
        item = self._take()
        if isinstance(item, Group):
            return item.items if item.opening == "{" else (item,)
        if item.kind is Kind.MARK and item.text in "+-":
            return (item, *self._script_items())
        if item.kind is Kind.LETTERS and item.text not in FUNCTIONS and len(item.text) > 1:
            self._divide(item, 1)
            return (item._replace(text=item.text[0]),)
        if item.kind is Kind.COMMAND and item.text in ("frac", "sqrt", "binom"):
            start = self._at
            self._at -= 1
            self._atom()
            return tuple(self._items[start - 1 : self._at])
        if item.kind is Kind.MARK and item.text != "'":
            raise AnswerError(f"a script cannot be {item.text}")
        return (item,)

    def _factorial(self, node: Node) -> Node:
        self._at += 1
        if is_mark(self.item, "!"):
            self._at += 1
            return Apply("factorial2", (node,))
        return Apply("factorial", (node,))

    # Atoms

    def _starts_atom(self) -> bool:
        item = self.item
        if item is None:
            return False
        if isinstance(item, Group):
            return True
        if item.kind is Kind.COMMAND:
            return item.text not in _NOT_ATOMS and not item.text.startswith("mathbb")
        return item.kind in (Kind.NUMBER, Kind.LETTERS, Kind.WORD) or is_mark(item, "|")

    def _atom(self) -> Node:
        if not self._starts_atom():
            raise AnswerError("an operand is missing")
        item = self._take()
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
        start = self._at
        fraction = self._fraction_of_integers()
        if fraction is not None and 0 < fraction < 1:
            return Number(token.value + fraction)
        self._at = start
        return number

    def _fraction_of_integers(self) -> Fraction | None:
        """The value of \\frac{1}{2} or of 1/2 after a space."""
        if is_command(self.item, "frac"):
            self._at += 1
            top, bottom = self._argument(), self._argument()
            integers = isinstance(top, Number) and isinstance(bottom, Number)
            return top.value / bottom.value if integers and bottom.value else None  # type: ignore[union-attr]
        following = self._items[self._at : self._at + 3]
        if len(following) < 3 or not is_mark(following[1], "/"):
            return None
        top_token, bottom_token = following[0], following[2]
        if not isinstance(top_token, Token) or not isinstance(bottom_token, Token) or not top_token.spaced:
            return None
        if top_token.value is None or not bottom_token.value:
            return None
        self._at += 3
        return top_token.value / bottom_token.value

    def _letters(self, token: Token) -> Node:
        run = token.text
        if run in FUNCTIONS:
            return self._function(run)
        if run == "pi":
            return Symbol("pi")
        for name in _PREFIXED:
            if run.startswith(name) and len(run) == len(name) + 1:
                self._divide(token, len(name))
                return self._function(name)
        if len(run) > 1:
            self._divide(token, 1)
        return self._letter(run[0])

    def _letter(self, letter: str) -> Node:
        """A variable, or the value of an unknown function: f'(x)."""
        start = self._at
        primes = self._primes()
        argument = self.item
        if isinstance(argument, Group) and argument.opening == "(" and argument.closing == ")":
            lone = len(argument.items) == 1 and isinstance(argument.items[0], Token)
            is_function = letter in _ALWAYS_FUNCTIONS or (letter in _OFTEN_FUNCTIONS and lone) or bool(primes)
            if is_function or any(is_mark(item, ",") for item in argument.items):
                self._at += 1
                return Apply(f"{UNKNOWN_FUNCTION}{letter}{primes}", _arguments(argument))
        self._at = start
        return Symbol(letter)

    def _primes(self) -> str:
        """The primes that follow, written as ' or as a script."""
        primes = ""
        while is_mark(self.item, "'"):
            self._at += 1
            primes += "'"
        following = self._items[self._at : self._at + 2]
        if not primes and len(following) == 2 and is_mark(following[0], "^"):
            script = following[1].items if isinstance(following[1], Group) else (following[1],)
            if script and all(is_mark(item, "'") for item in script):
                self._at += 2
                return "'" * len(script)
        return primes

    def _absolute_value(self) -> Node:
        """From after a bar to the next one."""
        start = self._at
        while self.item is not None and not is_mark(self.item, "|"):
            self._at += 1
        if self.item is None:
            raise AnswerError("a bar is not closed")
        inner = tuple(self._items[start : self._at])
        self._at += 1
        return Apply("abs", (parse_expression(inner),))

    # Commands

    def _command(self, name: str) -> Node:
        if name == "frac":
            return self._fraction()
        if name == "sqrt":
            return self._root()
        if name == "binom":
            return Apply("binom", (self._argument(), self._argument()))
        if name in FUNCTIONS:
            return self._function(name)
        if name in _BIG_OPERATORS:
            return self._big_operator(name)
        if name in _ACCENTS:
            return _accented(name, self._argument_items())
        if name in _FIGURES:
            return self._figure(name)
        return Symbol(name)

    def _fraction(self) -> Node:
        start = self._at
        top, bottom = self._argument_items(), self._argument_items()
        if _is_differential(top, derivative=True) and _is_differential(bottom, derivative=False):
            return Symbol(f"{spell(top)}/{spell(bottom)}")
        self._at = start
        return Apply("div", (self._argument(), self._argument()))

    def _root(self) -> Node:
        degree: Node = _TWO
        if is_group(self.item, "["):
            degree = parse_expression(self._take().items)  # type: ignore[union-attr]  # a group
        return Apply("root", (self._argument(whole_number=True), degree))

    def _argument(self, whole_number: bool = False) -> Node:
        return parse_expression(self._argument_items(whole_number))

    def _argument_items(self, whole_number: bool = False) -> Items:
        """A command's argument: a group, or one digit, letter or command. `whole_number` takes all digits."""
        item = self._take()
        if isinstance(item, Group):
            return item.items if item.opening == "{" else (item,)
        if item.kind is Kind.NUMBER and not whole_number:
            return self._first_digit(item)
        self._at -= 1
        return self._script_items()

    def _first_digit(self, token: Token) -> Items:
        if not token.text.isdecimal():
            raise AnswerError(f"{token.text} is no argument")
        if len(token.text) > 1:
            self._divide(token, 1)
        return (_part(token, slice(1)),)

    def _figure(self, name: str) -> Node:
        """An angle, triangle or the like: the sign with the letters that follow are one name."""
        letters: list[Item] = []
        while isinstance(self.item, Token) and (self.item.kind is Kind.LETTERS or is_mark(self.item, "_", "'")):
            letters.append(self._take())
            if is_mark(letters[-1], "_"):
                letters.extend(self._script_items())
        return Symbol(f"{name} {spell(tuple(letters))}")

    # Functions

    def _function(self, name: str) -> Node:
        base, exponent = self._function_scripts()
        arguments = self._function_arguments(name)
        if name in _ARC and exponent == Apply("neg", (ONE,)):
            return Apply(_ARC[name], arguments)
        if name in ("log", "lg"):
            arguments = (*arguments, base or integer(10))
            name = "log"
        node = Apply("root" if name == "sqrt" else name, arguments)
        return node if exponent is None else Apply("pow", (node, exponent))

    def _function_scripts(self) -> tuple[Node | None, Node | None]:
        """The base and the exponent between a function and its argument, as in \\log_2 x and \\sin^2 x."""
        base = exponent = None
        while is_mark(self.item, "_", "^"):
            is_base = is_mark(self._take(), "_")
            script = parse_expression(self._script_items())
            base, exponent = (script, exponent) if is_base else (base, script)
        return base, exponent

    def _function_arguments(self, name: str) -> tuple[Node, ...]:
        if name == "sqrt":
            return (self._argument(whole_number=True), _TWO)
        item = self.item
        if isinstance(item, Group) and item.opening in ("(", "["):
            self._at += 1
            return _arguments(item)
        return (self._signed(self._bare_argument),)

    def _bare_argument(self) -> Node:
        """A function's argument without parentheses: one factor, and the letters that follow it."""
        node = self._power()
        while self._is_letter() and not is_command(self.item, *FUNCTIONS, *_BIG_OPERATORS, "frac", "sqrt", "binom"):
            node = Apply("mul", (node, self._power()))
        return node

    def _is_letter(self) -> bool:
        item = self.item
        letters = isinstance(item, Token) and item.kind in (Kind.LETTERS, Kind.COMMAND) and item.text not in FUNCTIONS
        return letters and self._starts_atom()

    def _big_operator(self, name: str) -> Node:
        low, high = self._bounds()
        if name == "int":
            return self._integral(low, high)
        parts, signs = split(low, lambda item: is_command(item, "to") if name == "lim" else is_mark(item, "="))
        if len(signs) != 1:
            raise AnswerError(f"{name} without a variable")
        variable, start = parse_expression(parts[0]), parse_expression(parts[1])
        if not isinstance(variable, Symbol):
            raise AnswerError(f"{name} over no variable")
        body = self.product()
        if name == "lim":
            return Apply("lim", (body, variable, start))
        return Apply(name, (body, variable, start, parse_expression(high)))

    def _bounds(self) -> tuple[Items, Items]:
        low: Items = ()
        high: Items = ()
        while is_mark(self.item, "_", "^"):
            is_low = is_mark(self._take(), "_")
            script = self._script_items()
            low, high = (script, high) if is_low else (low, script)
        return low, high

    def _integral(self, low: Items, high: Items) -> Node:
        """The integrand up to dx. Raises AnswerError for an integral without bounds."""
        body: list[Item] = []
        while (item := self._take_or_none()) is not None:
            if isinstance(item, Token) and item.kind is Kind.LETTERS and "d" in item.text:
                before, _, after = item.text.rpartition("d")
                if not after and isinstance(self.item, Token) and self.item.kind is Kind.LETTERS:
                    after = self._take().text  # type: ignore[union-attr]  # a token
                if len(after) == 1:
                    body.extend([item._replace(text=before)] if before else [])
                    integrand = parse_expression(tuple(body)) if body else ONE
                    return Apply("int", (integrand, Symbol(after), parse_expression(low), parse_expression(high)))
            body.append(item)
        raise AnswerError("an integral without a variable")

    # Position

    def _take(self) -> Item:
        item = self._take_or_none()
        if item is None:
            raise AnswerError("an operand is missing")
        return item

    def _take_or_none(self) -> Item | None:
        item = self.item
        self._at += item is not None
        return item

    def _divide(self, token: Token, size: int) -> None:
        """Replace the token just taken by its first `size` characters, taken, and the rest, which comes next."""
        rest = _part(token, slice(size, None))
        self._items[self._at - 1 : self._at] = [_part(token, slice(size)), rest._replace(spaced=False)]


def _part(token: Token, part: slice) -> Token:
    text = token.text[part]
    return token._replace(text=text, value=Fraction(int(text)) if token.kind is Kind.NUMBER else None)


def _bracketed(group: Group) -> Node:
    """The expression within brackets. Raises AnswerError for a list, a set or an environment."""
    inner = group.items
    if group.opening in ("(", "[") and (group.opening, group.closing) not in (("(", ")"), ("[", "]")):
        raise AnswerError("an interval is no expression")
    if group.opening in ("(", "[", "{"):
        return parse_expression(inner) if inner or group.opening != "{" else ONE
    if group.opening in ("lvert", "lfloor", "lceil"):
        name = {"lvert": "abs", "lfloor": "floor", "lceil": "ceil"}[group.opening]
        return Apply(name, (parse_expression(inner),))
    raise AnswerError(f"{group.opening} in an expression")


def _arguments(group: Group) -> tuple[Node, ...]:
    parts, _ = split(group.items, lambda item: is_mark(item, ","))
    return tuple(map(parse_expression, parts))


def _with_subscript(node: Node, items: Items) -> Node:
    """A symbol with a subscript in its name, or a number in a base."""
    if isinstance(node, Apply) and node.function == "pow" and isinstance(node.arguments[0], Symbol):
        return Apply("pow", (_with_subscript(node.arguments[0], items), node.arguments[1]))
    if isinstance(node, Symbol):
        return Symbol(f"{node.name}_{spell(items)[:_MAX_SUBSCRIPT]}")
    if isinstance(node, Number):
        return Apply("base", (node, parse_expression(items)))
    raise AnswerError("a subscript to an expression")


def _primed(node: Node) -> Node:
    if isinstance(node, Symbol):
        return Symbol(node.name + "'")
    if isinstance(node, Number):
        return Apply("minutes", (node,))
    if isinstance(node, Apply) and node.function == "minutes":
        return Apply("seconds", node.arguments)
    raise AnswerError("a prime after an expression")


def _accented(name: str, items: Items) -> Node:
    """A symbol with an accent. A bar over numbers is conjugation, over several capitals a segment: their product."""
    spelt = spell(items)
    if name in ("bar", "overline"):
        if len(spelt) > 1 and spelt.isalpha() and spelt.isupper():
            return parse_expression(items)
        if any(character.isdecimal() for character in spelt) and not spelt.isdecimal():
            return Apply("conj", (parse_expression(items),))
        name = "bar"
    return Symbol(f"{name} {spelt}")


def _is_differential(items: Items, derivative: bool) -> bool:
    """Whether items are dx, or, above the line of a derivative, d, df or d^2 f."""
    if not items or not isinstance(items[0], Token):
        return False
    first = items[0]
    if first.kind is Kind.COMMAND and first.text == "partial":
        return derivative or len(items) > 1
    if first.kind is not Kind.LETTERS or not first.text.startswith("d"):
        return False
    second = items[1] if len(items) > 1 else None
    followed = isinstance(second, Token) and second.kind in (Kind.LETTERS, Kind.COMMAND)
    return len(first.text) > 1 or followed or (derivative and (second is None or is_mark(second, "^")))
