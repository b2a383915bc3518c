"""Units after (or, for currencies, before) a number: 5 \\text{ cm}, 25°C, €18, 5元, 3 million, 8 \\%, 12 apples."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.groups import (
    Group,
    Item,
    Items,
    is_command,
    is_group,
    is_mark,
    is_word,
    spell,
)
from spiral_mega.rewards.symbolic.tokens import FUNCTIONS, Kind, Token
from spiral_mega.rewards.symbolic.unit_table import (
    CURRENCIES,
    DEGREE,
    ONE_UNIT,
    PERCENT,
    SCALES,
    TEMPERATURES,
    Unit,
    find_unit,
)
from spiral_mega.rewards.symbolic.vocabulary import vocabulary

_RAW = vocabulary(
    """
    cm mm km kg Hz kHz MHz GHz eV keV MeV mol kJ kW kPa min sec hr hrs hour hours day days week
    weeks minute minutes second seconds meter meters metre metres inch inches feet foot mile
    miles dollar dollars cent cents degree degrees percent unit units gram grams kilogram
    kilograms liter liters litre litres year years mph thousand million billion trillion dozen
    th st nd rd radians rad deg square cubic per ft lb lbs
    """
)
_POWERS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "立方": 3}
_WITHOUT_MEANING = frozenset({"st", "nd", "rd", "th", "a", "an", "of"})
_NOT_UNITS = vocabulary(
    """
    or and not no to more less fewer greater least most than if when then plus minus times over
    squared cubed mod modulo factorial where is are was even odd choose with from between
    negative positive half if for except at up down divided by but either neither nor only off
    raised power square-root x y z
    """
)
_MAX_WORDS = 5
_MAX_ITEMS = 24


class Measured(NamedTuple):
    """A number's tokens without its unit; the unit; and the factor that a word such as million stands for."""

    items: Items
    unit: Unit | None = None
    factor: Fraction = Fraction(1)


def split_unit(items: Items) -> Measured:
    """Take the unit off a number or an expression. Without a unit, the items as they are."""
    sign = 1 if len(items) > 1 and is_mark(items[0], "-", "+") else 0
    lead = items[sign] if len(items) > sign + 1 else None
    if isinstance(lead, Token) and is_mark(lead, *CURRENCIES):
        number = split_unit((*items[:sign], *items[sign + 1 :]))
        return Measured(number.items, CURRENCIES[lead.text], number.factor)
    for start in range(max(1, len(items) - _MAX_ITEMS), len(items)):
        if _may_begin_unit(items, start):
            try:
                unit, factor = _UnitReader(items[start:]).read()
            except AnswerError:
                continue
            if unit == DEGREE and _is_within_expression(items[:start]):
                continue
            return Measured(items[:start], unit, factor)
    return Measured(items)


def _is_within_expression(items: Items) -> bool:
    """Whether degrees after these items belong to the last angle only, as in cos 60° and 30° + 15°."""
    return any(
        is_command(item, *FUNCTIONS, "degree", "circ") or _is_degree(_inner(item)) for item in items
    )


def _may_begin_unit(items: Items, start: int) -> bool:
    """Whether items[start] can be the first of a unit. A quick look; primes and % follow numbers only."""
    item, before = items[start], items[start - 1]
    if is_mark(before, "^", "_", "+", "-", "*", "/", "=") or is_command(
        before, "frac", "sqrt", "cdot", "times"
    ):
        return False
    if is_mark(item, "'", "%"):
        return isinstance(before, Token) and before.kind is Kind.NUMBER
    if is_mark(item, "^"):
        after_number = isinstance(before, Token) and before.kind is Kind.NUMBER
        script = _inner(items[start + 1]) if start + 1 < len(items) else ()
        return (
            (_is_degree(script) or _is_primes(script)) if after_number else spell(script) == "circ"
        )
    if is_mark(item, *CURRENCIES) or is_word(item) or is_command(item, "degree", "mu", "Omega"):
        return True
    if is_command(item, "frac") or is_group(item, "(", "{"):
        return any(is_word(inner) for inner in _tokens(items[start:]))
    return isinstance(item, Token) and item.kind is Kind.LETTERS and item.text in _RAW


class _UnitReader:
    """A position in the items of a unit, and the product of the units before it."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self._at = 0
        self._unit = ONE_UNIT
        self._last = ONE_UNIT
        self._factor = Fraction(1)
        self._words = 0
        self._next_power = 1

    def read(self) -> tuple[Unit | None, Fraction]:
        """The unit (None for words of scale alone), and the factor. Raises AnswerError for what is no unit."""
        while self._at < len(self._items):
            item = self._items[self._at]
            self._at += 1
            if isinstance(item, Group):
                self._group(item.items)
            elif item.kind is Kind.WORD or (item.kind is Kind.LETTERS and item.text in _RAW):
                self._word(item.text)
            elif item.kind is Kind.COMMAND:
                self._command(item.text)
            elif item.kind is Kind.MARK:
                self._mark(item.text)
            else:
                raise AnswerError(f"{item.text} in a unit")
        if self._words:
            return ONE_UNIT, self._factor
        return (self._unit if self._unit.powers else None), self._factor

    def _group(self, items: Items) -> None:
        unit, factor = _UnitReader(items).read()
        self._factor *= factor
        self._add(unit or ONE_UNIT)
        self._words += unit == ONE_UNIT

    def _word(self, word: str) -> None:
        lower = word.lower()
        if lower in _NOT_UNITS:
            raise AnswerError(f"{word} is no unit")
        scale = next((name for name in SCALES if lower.startswith(name)), None)
        known = find_unit(word)
        if lower == "per":
            self._next_power = -1
        elif lower in _POWERS:
            self._next_power *= _POWERS[lower]
        elif known is not None:
            self._add(known)
        elif scale is not None and (
            scale == lower or not scale.isascii()
        ):  # 万元 is ten thousand yuan
            self._factor *= SCALES[scale]
            if scale != lower:
                self._word(word[len(scale) :])
        elif lower not in _WITHOUT_MEANING:
            self._words += 1
            self._next_power = 1
            if self._words > _MAX_WORDS:
                raise AnswerError("too many words for a unit")

    def _command(self, name: str) -> None:
        following = self._items[self._at : self._at + 2]
        if name == "frac" and len(following) == 2:
            self._at += 2
            self._group(_inner(following[0]))
            self._next_power = -1
            self._group(_inner(following[1]))
        elif name == "degree":
            self._degree()
        elif name in ("Omega", "mu"):
            self._symbol("Omega" if name == "Omega" else "u" + spell(following[:1]))
            self._at += name == "mu"
        elif name not in ("cdot", "times"):
            raise AnswerError(f"{name} in a unit")

    def _mark(self, mark: str) -> None:
        if mark == "/":
            self._next_power = -1
        elif mark == "%":
            self._add(PERCENT)
        elif mark in CURRENCIES:
            self._add(CURRENCIES[mark])
        elif mark == "'":
            self._minutes(1)
        elif mark == "^" and self._at < len(self._items):
            self._at += 1
            self._script(self._items[self._at - 1])
        elif mark not in (".", "*"):
            raise AnswerError(f"{mark} in a unit")

    def _script(self, script: Item) -> None:
        inner = _inner(script)
        if _is_degree(inner):
            self._degree()
        elif _is_primes(inner):
            self._minutes(len(inner))
        elif spell(inner) not in _WITHOUT_MEANING:
            self._unit = self._unit.times(self._last.to_power(_integer(inner) - 1))

    def _degree(self) -> None:
        """An angle, or a temperature if C, F or K follows."""
        temperature = TEMPERATURES.get(spell(self._items[self._at : self._at + 1]))
        self._at += temperature is not None
        self._add(temperature or DEGREE)

    def _minutes(self, primes: int) -> None:
        """Minutes of arc, and a second prime makes them seconds."""
        while self._at < len(self._items) and is_mark(self._items[self._at], "'"):
            self._at += 1
            primes += 1
        self._add(Unit(DEGREE.powers, Fraction(1, 60**primes)))

    def _symbol(self, symbol: str) -> None:
        unit = find_unit(symbol)
        if unit is None:
            raise AnswerError(f"{symbol} is no unit")
        self._add(unit)

    def _add(self, unit: Unit) -> None:
        """Multiply by a unit, to the power that "square", "per" or a slash before it asks for."""
        self._last = unit.to_power(self._next_power)
        self._next_power = 1
        self._unit = self._unit.times(self._last)


def _inner(item: Item) -> Items:
    return item.items if isinstance(item, Group) else (item,)


def _is_degree(items: Items) -> bool:
    """Whether a script is a degree sign, also as it is written with the letter o."""
    return spell(items) in ("circ", "o")


def _is_primes(items: Items) -> bool:
    return len(items) > 0 and all(is_mark(item, "'") for item in items)


def _integer(items: Items) -> int:
    spelt = spell(items)
    if not spelt.removeprefix("-").isdecimal() or len(spelt) > 2:
        raise AnswerError(f"{spelt} is no power of a unit")
    return int(spelt)


def _tokens(items: Items) -> Iterator[Token]:
    """All tokens, at any depth."""
    for item in items:
        if isinstance(item, Group):
            yield from _tokens(item.items)
        else:
            yield item
