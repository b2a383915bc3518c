"""Units of measurement by their symbols and names, and the words for large numbers that stand before them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import NamedTuple


class Unit(NamedTuple):
    """Powers of base units, sorted by name, and the size in them. Words that are no known unit have
    no powers.

    Percent, currencies and the modulus of a congruence count as base units.
    """

    powers: tuple[tuple[str, int], ...]
    size: Fraction = Fraction(1)

    def times(self, other: Unit) -> Unit:
        """The product of two units."""
        powers = Counter(dict(self.powers))
        for name, power in other.powers:
            powers[name] += power
        kept = sorted((name, power) for name, power in powers.items() if power)
        return Unit(tuple(kept), self.size * other.size)

    def to_power(self, exponent: int) -> Unit:
        """A power of a unit."""
        return Unit(
            tuple((name, power * exponent) for name, power in self.powers), self.size**exponent
        )


def base_unit(name: str) -> Unit:
    """The unit of which others of its kind are multiples."""
    return Unit(((name, 1),))


ONE_UNIT = Unit(())
PERCENT = base_unit("percent")
DEGREE = base_unit("degree")
TEMPERATURES = {"C": base_unit("celsius"), "F": base_unit("fahrenheit"), "K": base_unit("kelvin")}
CURRENCIES = {
    "$": base_unit("dollar"),
    "€": base_unit("euro"),
    "£": base_unit("sterling"),
    "¥": base_unit("yuan"),
    "₹": base_unit("rupee"),
    "₩": base_unit("won"),
    "₽": base_unit("ruble"),
}
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
    "百万": 10**6,
    "千万": 10**7,
    "万": 10**4,
    "亿": 10**8,
    "千": 10**3,
    "百": 10**2,
}

# names = size and powers of base units
_WITH_PREFIXES = """
m meter metre          = 1 m
g gram                 = 1 g
s second               = 1 s
A ampere amp           = 1 A
mol mole               = 1 mol
eV electronvolt        = 1 eV
cal calorie            = 1 cal
L l liter litre        = 1/1000 m^3
Hz hertz               = 1 s^-1
N newton               = 1000 g m s^-2
J joule                = 1000 g m^2 s^-2
W watt                 = 1000 g m^2 s^-3
Pa pascal              = 1000 g m^-1 s^-2
V volt                 = 1000 g m^2 s^-3 A^-1
Omega ohm              = 1000 g m^2 s^-3 A^-2
F farad                = 1/1000 g^-1 m^-2 s^4 A^2
T tesla                = 1000 g s^-2 A^-1
"""
_WITHOUT_PREFIXES = """
C                      = 1 celsius
K kelvin               = 1 kelvin
min minute             = 60 s
sec                    = 1 s
h hr hour              = 3600 s
day                    = 86400 s
week                   = 604800 s
year yr                = 1 year
month                  = 1/12 year
in inch                = 0.0254 m
ft foot feet           = 0.3048 m
yd yard                = 0.9144 m
mi mile                = 1609.344 m
mph                    = 0.44704 m s^-1
lb pound               = 453.59237 g
oz ounce               = 28.349523125 g
ton tonne              = 1000000 g
hectare ha             = 10000 m^2
dollar usd             = 1 dollar
cent                   = 1/100 dollar
euro eur               = 1 euro
yuan rmb yen           = 1 yuan
rupee                  = 1 rupee
degree deg             = 1 degree
radian rad             = 1 radian
percent                = 1 percent
元 块                  = 1 yuan
克                     = 1 g
千克 公斤              = 1000 g
毫米                   = 0.001 m
厘米                   = 0.01 m
米                     = 1 m
千米 公里              = 1000 m
平方厘米               = 0.0001 m^2
平方米                 = 1 m^2
立方厘米               = 0.000001 m^3
立方米                 = 1 m^3
秒                     = 1 s
分钟                   = 60 s
小时                   = 3600 s
天                     = 86400 s
度                     = 1 degree
"""
_SYMBOL_PREFIXES = {"n": -9, "u": -6, "m": -3, "c": -2, "d": -1, "k": 3, "M": 6, "G": 9}
_NAME_PREFIXES = {
    "nano": -9,
    "micro": -6,
    "milli": -3,
    "centi": -2,
    "deci": -1,
    "kilo": 3,
    "mega": 6,
    "giga": 9,
}


@cache
def find_unit(word: str) -> Unit | None:
    """The unit of a symbol or name, in the singular or plural; None if it is not known."""
    units = _units()
    if word in units:
        return units[word]
    lower = word.lower() if len(word) > 2 else word
    for singular in (lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if len(singular) > 1 and singular in units:
            return units[singular]
    return None


@cache
def _units() -> dict[str, Unit]:
    units = {name: unit for names, unit in _entries(_WITHOUT_PREFIXES) for name in names}
    for names, unit in _entries(_WITH_PREFIXES):
        for name in names:
            prefixes = _NAME_PREFIXES if len(name) > 3 else _SYMBOL_PREFIXES
            for prefix, exponent in prefixes.items():
                units.setdefault(
                    prefix + name, Unit(unit.powers, unit.size * Fraction(10) ** exponent)
                )
            units[name] = unit
    return units


def _entries(table: str) -> Iterator[tuple[list[str], Unit]]:
    """The names and the unit of each line of a table."""
    for line in table.strip().splitlines():
        names, _, definition = line.partition("=")
        size, *factors = definition.split()
        unit = Unit((), Fraction(size))
        for factor in factors:
            name, _, exponent = factor.partition("^")
            unit = unit.times(base_unit(name).to_power(int(exponent or 1)))
        yield names.split(), unit
