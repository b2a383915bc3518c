"""Units after (or, for currencies, before) a number: 5 \\text{ cm}, 25°C, €18, 5元, 3 million, 8 \\%, 12 apples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from spiral_mega.rewards.symbolic.answers import Unit
from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.groups import Group, Item, Items, is_command, is_group, is_mark, is_word, spell
from spiral_mega.rewards.symbolic.tokens import CURRENCIES, Kind, Token

PERCENT = Unit((("percent", 1),))
DEGREE = Unit((("degree", 1),))

_CURRENCY_SIGNS = {"$": "dollar", "€": "euro", "£": "sterling", "¥": "yuan", "₹": "rupee", "₩": "won", "₽": "ruble"}
_PREFIXES = {"n": -9, "u": -6, "m": -3, "c": -2, "d": -1, "k": 3, "M": 6, "G": 9}
_PREFIX_NAMES = {"nano": -9, "micro": -6, "milli": -3, "centi": -2, "deci": -1, "kilo": 3, "mega": 6, "giga": 9}
_KILOGRAM = Fraction(1000)

# name: (powers of base units, size in them). Lengths in meters, masses in grams, times in seconds.
_SI = {
    "m": ({"m": 1}, Fraction(1)),
    "g": ({"g": 1}, Fraction(1)),
    "s": ({"s": 1}, Fraction(1)),
    "A": ({"A": 1}, Fraction(1)),
    "mol": ({"mol": 1}, Fraction(1)),
    "eV": ({"eV": 1}, Fraction(1)),
    "cal": ({"cal": 1}, Fraction(1)),
    "L": ({"m": 3}, Fraction(1, 1000)),
    "l": ({"m": 3}, Fraction(1, 1000)),
    "Hz": ({"s": -1}, Fraction(1)),
    "N": ({"g": 1, "m": 1, "s": -2}, _KILOGRAM),
    "J": ({"g": 1, "m": 2, "s": -2}, _KILOGRAM),
    "W": ({"g": 1, "m": 2, "s": -3}, _KILOGRAM),
    "Pa": ({"g": 1, "m": -1, "s": -2}, _KILOGRAM),
    "V": ({"g": 1, "m": 2, "s": -3, "A": -1}, _KILOGRAM),
    "Omega": ({"g": 1, "m": 2, "s": -3, "A": -2}, _KILOGRAM),
    "F": ({"g": -1, "m": -2, "s": 4, "A": 2}, 1 / _KILOGRAM),
    "T": ({"g": 1, "s": -2, "A": -1}, _KILOGRAM),
    "C": ({"celsius": 1}, Fraction(1)),
    "K": ({"kelvin": 1}, Fraction(1)),
}
_SI_NAMES = {
    "meter": "m", "metre": "m", "gram": "g", "second": "s", "ampere": "A", "mole": "mol", "calorie": "cal",
    "liter": "L", "litre": "L", "hertz": "Hz", "newton": "N", "joule": "J", "watt": "W", "pascal": "Pa", "volt": "V",
    "ohm": "Omega", "farad": "F", "tesla": "T",
}  # fmt: skip
_OTHERS = {
    "min": ({"s": 1}, 60), "minute": ({"s": 1}, 60), "sec": ({"s": 1}, 1), "hour": ({"s": 1}, 3600),
    "hr": ({"s": 1}, 3600), "h": ({"s": 1}, 3600), "day": ({"s": 1}, 86400), "week": ({"s": 1}, 7 * 86400),
    "year": ({"year": 1}, 1), "yr": ({"year": 1}, 1), "month": ({"year": 1}, Fraction(1, 12)),
    "inch": ({"m": 1}, Fraction("0.0254")), "in": ({"m": 1}, Fraction("0.0254")),
    "foot": ({"m": 1}, Fraction("0.3048")), "feet": ({"m": 1}, Fraction("0.3048")),
    "ft": ({"m": 1}, Fraction("0.3048")), "yard": ({"m": 1}, Fraction("0.9144")),
    "yd": ({"m": 1}, Fraction("0.9144")), "mile": ({"m": 1}, Fraction("1609.344")),
    "mi": ({"m": 1}, Fraction("1609.344")), "mph": ({"m": 1, "s": -1}, Fraction("0.44704")),
    "lb": ({"g": 1}, Fraction("453.59237")), "pound": ({"g": 1}, Fraction("453.59237")),
    "oz": ({"g": 1}, Fraction("28.349523125")), "ounce": ({"g": 1}, Fraction("28.349523125")),
    "ton": ({"g": 1}, 10**6), "tonne": ({"g": 1}, 10**6), "hectare": ({"m": 2}, 10**4), "ha": ({"m": 2}, 10**4),
    "dollar": ({"dollar": 1}, 1), "usd": ({"dollar": 1}, 1), "cent": ({"dollar": 1}, Fraction(1, 100)),
    "euro": ({"euro": 1}, 1), "eur": ({"euro": 1}, 1), "yuan": ({"yuan": 1}, 1), "元": ({"yuan": 1}, 1),
    "rmb": ({"yuan": 1}, 1), "rupee": ({"rupee": 1}, 1), "yen": ({"yuan": 1}, 1),
    "degree": ({"degree": 1}, 1), "deg": ({"degree": 1}, 1), "radian": ({"radian": 1}, 1), "rad": ({"radian": 1}, 1),
    "percent": ({"percent": 1}, 1), "千克": ({"g": 1}, 1000), "公斤": ({"g": 1}, 1000), "克": ({"g": 1}, 1),
    "厘米": ({"m": 1}, Fraction(1, 100)), "米": ({"m": 1}, 1), "千米": ({"m": 1}, 1000), "公里": ({"m": 1}, 1000),
    "平方厘米": ({"m": 2}, Fraction(1, 10**4)), "平方米": ({"m": 2}, 1), "小时": ({"s": 1}, 3600),
    "分钟": ({"s": 1}, 60), "秒": ({"s": 1}, 1), "度": ({"degree": 1}, 1), "天": ({"s": 1}, 86400),
}  # fmt: skip
_SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "万": 10**4, "亿": 10**8, "千": 10**3, "百万": 10**6,
}  # fmt: skip
_RAW = frozenset(
    "cm mm km kg Hz kHz MHz GHz eV keV MeV mol kJ kW kPa min sec hr hrs hour hours day days week weeks minute minutes "
    "second seconds meter meters metre metres inch inches feet foot mile miles dollar dollars cent cents degree degrees "
    "percent unit units gram grams kilogram kilograms liter liters litre litres year years mph thousand million billion "
    "trillion dozen th st nd rd radians rad deg square cubic per ft lb lbs".split()
)
_ORDINALS = frozenset({"st", "nd", "rd", "th"})
_NOT_UNITS = frozenset(
    "or and not no to more less fewer greater least most than if when then plus minus times over squared cubed mod modulo "
    "factorial where is are was even odd choose with from between negative positive half if for except at up down "
    "divided by but either neither nor only off raised power square-root of x y z".split()
)
_MAX_WORDS = 5


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
        return Measured(number.items, Unit(((_CURRENCY_SIGNS[lead.text], 1),)), number.factor)
    for start in range(1, len(items)):
        if _may_begin_unit(items, start):
            try:
                unit, factor = _UnitReader(items[start:]).read()
            except AnswerError:
                continue
            return Measured(items[:start], unit, factor)
    return Measured(items)


def _may_begin_unit(items: Items, start: int) -> bool:
    """Whether items[start] can be the first of a unit. A quick look; primes and % follow numbers only."""
    item, before = items[start], items[start - 1]
    if is_mark(before, "^", "_", "+", "-", "*", "/", "=") or is_command(before, "frac", "sqrt", "cdot", "times"):
        return False
    if is_mark(item, "'", "%"):
        return isinstance(before, Token) and before.kind is Kind.NUMBER
    if is_mark(item, "^"):
        return _is_degree(items[start + 1 : start + 2]) or _is_primes(items[start + 1 : start + 2])
    if is_mark(item, *CURRENCIES) or is_word(item) or is_command(item, "degree", "mu", "Omega"):
        return True
    if is_command(item, "frac") or is_group(item, "(", "{"):
        return any(is_word(inner) for inner in _tokens(items[start:]))
    return isinstance(item, Token) and item.kind is Kind.LETTERS and item.text in _RAW


class _UnitReader:
    """A position in the items of a unit, and the powers and the size of what was read."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self._at = 0
        self._powers: Counter[str] = Counter()
        self._size = Fraction(1)
        self._factor = Fraction(1)
        self._words = 0
        self._units = 0
        self._next_power = 1
        self._last: tuple[dict[str, int], Fraction] = ({}, Fraction(1))

    def read(self) -> tuple[Unit | None, Fraction]:
        """The unit (None for words of scale alone), and the factor. Raises AnswerError for what is no unit."""
        while self._at < len(self._items):
            item = self._items[self._at]
            self._at += 1
            if isinstance(item, Group):
                self._group(item)
            elif item.kind is Kind.WORD or (item.kind is Kind.LETTERS and item.text in _RAW):
                self._word(item.text)
            elif item.kind is Kind.COMMAND:
                self._command(item.text)
            elif item.kind is Kind.MARK:
                self._mark(item.text)
            else:
                raise AnswerError(f"{item.text} in a unit")
        if self._words > _MAX_WORDS:
            raise AnswerError("too many words for a unit")
        if self._words:
            return Unit(()), self._factor
        if not self._units:
            return None, self._factor
        powers = tuple(sorted((name, power) for name, power in self._powers.items() if power))
        return Unit(powers, self._size), self._factor

    def _group(self, group: Group) -> None:
        unit, factor = _UnitReader(group.items).read()
        self._factor *= factor
        if unit is not None and unit.powers:
            self._add(dict(unit.powers), unit.size)
        else:
            self._words += 1

    def _word(self, word: str) -> None:
        lower = word.lower()
        if lower in _NOT_UNITS or len(self._items) == 1 and word in ("x", "y", "z", "n"):
            raise AnswerError(f"{word} is no unit")
        if lower in ("per", "a", "an", "of"):
            self._next_power = -1 if lower == "per" else self._next_power
        elif lower in ("square", "sq", "cubic", "平方", "立方"):
            self._next_power *= 3 if lower in ("cubic", "立方") else 2
        elif lower in _SCALES:
            self._factor *= _SCALES[lower]
        elif lower not in _ORDINALS:
            known = find_unit(word)
            if known is None:
                self._words += 1
                self._next_power = 1
            else:
                self._add(*known)

    def _command(self, name: str) -> None:
        if name == "frac" and self._at + 1 < len(self._items):
            top, bottom = self._items[self._at : self._at + 2]
            self._at += 2
            self._group(_as_group(top))
            self._next_power = -1
            self._group(_as_group(bottom))
        elif name == "degree":
            self._degree()
        elif name == "Omega":
            self._add(*_SI["Omega"])
        elif name == "mu" and self._at < len(self._items) and (known := find_unit("u" + spell(self._items[self._at :][:1]))):
            self._at += 1
            self._add(*known)
        elif name not in ("cdot", "times"):
            raise AnswerError(f"{name} in a unit")

    def _mark(self, mark: str) -> None:
        if mark == "/":
            self._next_power = -1
        elif mark == "%":
            self._add({"percent": 1}, Fraction(1))
        elif mark in CURRENCIES:
            self._add({_CURRENCY_SIGNS[mark]: 1}, Fraction(1))
        elif mark == "'":
            self._minutes(1)
        elif mark == "^" and self._at < len(self._items):
            self._at += 1
            self._script(self._items[self._at - 1])
        elif mark not in (".", "*"):
            raise AnswerError(f"{mark} in a unit")

    def _script(self, script: Item) -> None:
        inner = script.items if isinstance(script, Group) else (script,)
        if _is_degree((script,)):
            self._degree()
        elif _is_primes((script,)):
            self._minutes(len(inner))
        elif spell(inner) not in _ORDINALS:
            self._raise(_integer(inner) - 1)

    def _degree(self) -> None:
        """An angle, or a temperature if C, F or K follows."""
        following = spell(self._items[self._at :][:1])
        if following in ("C", "F", "K"):
            self._at += 1
            self._add({"celsius" if following == "C" else "fahrenheit" if following == "F" else "kelvin": 1}, Fraction(1))
        else:
            self._add({"degree": 1}, Fraction(1))

    def _minutes(self, primes: int) -> None:
        """Minutes of arc, and a second prime makes them seconds."""
        while self._at < len(self._items) and is_mark(self._items[self._at], "'"):
            self._at += 1
            primes += 1
        self._add({"degree": 1}, Fraction(1, 60) ** primes)

    def _add(self, powers: Mapping[str, int], size: Fraction) -> None:
        """Multiply by a unit, to the power that "square", "per" or a slash before it asks for."""
        times = self._next_power
        self._next_power = 1
        self._units += 1
        self._last = ({name: power * times for name, power in powers.items()}, size**times)
        self._raise(1)

    def _raise(self, times: int) -> None:
        """Multiply by the last unit that many times more."""
        powers, size = self._last
        for name, power in powers.items():
            self._powers[name] += power * times
        self._size *= size**times


@cache
def find_unit(word: str) -> tuple[Mapping[str, int], Fraction] | None:
    """The powers and the size of a unit by its symbol or name, in the singular or plural; None if it is not known."""
    for name in (word, word.lower()) if len(word) > 2 else (word,):
        for spelt in (name, name.removesuffix("s"), name.removesuffix("es")):
            if spelt in _OTHERS:
                powers, size = _OTHERS[spelt]
                return powers, Fraction(size)
            if spelt in _SI_NAMES:
                return _SI[_SI_NAMES[spelt]]
            for prefix, exponent in _PREFIX_NAMES.items():
                unit = _SI_NAMES.get(spelt.removeprefix(prefix))
                if spelt.startswith(prefix) and unit:
                    return _scaled(_SI[unit], exponent)
    if word in _SI:
        return _SI[word]
    if word[:1] in _PREFIXES and word[1:] in _SI:
        return _scaled(_SI[word[1:]], _PREFIXES[word[0]])
    return None


def _scaled(unit: tuple[Mapping[str, int], Fraction], exponent: int) -> tuple[Mapping[str, int], Fraction]:
    powers, size = unit
    return powers, size * Fraction(10) ** exponent


def _is_degree(items: Items) -> bool:
    inner = items[0].items if items and isinstance(items[0], Group) else items
    return len(inner) > 0 and all(is_command(item, "circ") for item in inner)


def _is_primes(items: Items) -> bool:
    inner = items[0].items if items and isinstance(items[0], Group) else items
    return len(inner) > 0 and all(is_mark(item, "'") for item in inner)


def _integer(items: Items) -> int:
    spelt = spell(items)
    if not spelt.removeprefix("-").isdecimal() or len(spelt) > 2:
        raise AnswerError(f"{spelt} is no power of a unit")
    return int(spelt)


def _as_group(item: Item) -> Group:
    return item if isinstance(item, Group) else Group("{", "}", (item,))


def _tokens(items: Items) -> Iterator[Token]:
    """All tokens in the first items, at any depth."""
    for item in items:
        if isinstance(item, Group):
            yield from _tokens(item.items)
        else:
            yield item
