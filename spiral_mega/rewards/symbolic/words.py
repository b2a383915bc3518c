"""Which letters are words, and what some words mean."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from fractions import Fraction

from spiral_mega.rewards.symbolic.answers import EMPTY_SET, Answer, Text, Value
from spiral_mega.rewards.symbolic.groups import Item, Items, is_mark
from spiral_mega.rewards.symbolic.nodes import INFINITY, NEGATIVE_INFINITY, Number
from spiral_mega.rewards.symbolic.tokens import FUNCTIONS, Kind, Token
from spiral_mega.rewards.symbolic.vocabulary import vocabulary

_VOWELS = frozenset("aeiouAEIOU")
_SHORT_WORDS = vocabulary("no on ok or so is it up")
_COMMON_WORDS = vocabulary("the there are is was were has have of in a an and or for all where so")
_CONSONANTS = re.compile(r"[^aeiouy]{5}", re.IGNORECASE)
_PUNCTUATION = (".", "'", "-", "!", "?", ":", "&", "/", "`")
_NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]
_MEANINGS: dict[str, Answer] = {
    **{name: Value(Number(Fraction(value))) for value, name in enumerate(_NUMBERS)},
    **dict.fromkeys(("infinity", "infinite", "positiveinfinity"), Value(INFINITY)),
    **dict.fromkeys(("negativeinfinity", "minusinfinity"), Value(NEGATIVE_INFINITY)),
    **dict.fromkeys(("nosolution", "nosolutions", "emptyset", "theemptyset", "none"), EMPTY_SET),
    "dne": Text("doesnotexist"),
}
_REVERSING = vocabulary(
    """
    not no never less fewer more greater least most than at except over under above below
    between plus minus times per or if unless cannot isn't wrong incorrect false either neither
    nor half twice double some any but besides without excluding instead different other another
    unknown
    """
)


def text_of(items: Items) -> Answer | None:
    """The words that items are, or what these mean; None if the items are mathematics.

    Letters in math mode are a product unless they look like words: `live` is a word, `ab` and `xyz`
    are products.
    """
    if not items or not all(_may_be_text(item) for item in items):
        return None
    tokens = [item for item in items if isinstance(item, Token) and item.kind is not Kind.MARK]
    words = [token.text for token in tokens if token.kind is Kind.WORD]
    letters = [token.text for token in tokens if token.kind is Kind.LETTERS]
    if any(map(is_long_word, tokens)) or _are_words(letters, alone=len(tokens) == 1):
        run = "".join(token.text for token in tokens)
        return Text(run) if run.isupper() and not words else text(run)
    return None


def points_in_order(items: Items) -> Answer | None:
    """Three capital letters or more alone: points or places in their order, so that ABCD is not ACBD."""
    if len(items) != 1 or not isinstance(items[0], Token):
        return None
    run = items[0].text
    in_order = items[0].kind is Kind.LETTERS and len(run) > 2 and run.isupper()
    return Text(run) if in_order else None


def text(words: str) -> Answer:
    """Words as an answer: without spaces, punctuation and case (but one or two letters keep theirs)."""
    plain = unicodedata.normalize("NFKC", words)
    key = "".join(character for character in plain if unicodedata.category(character)[0] in "LMN")
    key = key.casefold() if len(key) > 2 else key
    return _MEANINGS.get(key, Text(key))


def looks_like_word(run: str) -> bool:
    """Whether a run of letters in math mode, next to mathematics, is a word rather than a product."""
    if len(run) < 4 or run in FUNCTIONS or not run[1:].islower():
        return False
    share = sum(letter in _VOWELS for letter in run) / len(run)
    return 0.2 <= share <= 0.7 and not _CONSONANTS.search(run) and not _is_alphabetical(run)


def prose_as_words(tokens: list[Token]) -> list[Token]:
    """Read letters in math mode as words where they are prose: two words or more, or a long one after a space."""
    runs = [token.text for token in tokens if token.kind is Kind.LETTERS]
    likely = [run for run in runs if looks_like_word(run) or run.lower() in _COMMON_WORDS]
    long_one = any(looks_like_word(run) and len(run) > 4 for run in runs)
    if len(likely) < 2 and not long_one:
        return tokens
    return [token._replace(kind=Kind.WORD) if _is_long_run(token) else token for token in tokens]


def _is_long_run(token: Token) -> bool:
    return token.kind is Kind.LETTERS and len(token.text) > 1 and token.text not in FUNCTIONS


def is_long_word(item: Item) -> bool:
    """Whether an item is a word of more than one letter, or of another script."""
    if not isinstance(item, Token) or item.kind is not Kind.WORD:
        return False
    return len(item.text) > 1 or not item.text.isascii()


def is_prose(token: Token) -> bool:
    """Whether a token next to mathematics is a word of a text around it."""
    return token.kind is Kind.WORD or (token.kind is Kind.LETTERS and looks_like_word(token.text))


def leaves_number_alone(words: Iterable[str]) -> bool:
    """Whether prose around a number says that this number is the answer: not so "not 5", "less than 5", "5 or more"."""
    return not any(word.lower() in _REVERSING for word in words)


def _may_be_text(item: Item) -> bool:
    if not isinstance(item, Token) or (item.kind is Kind.MARK and not is_mark(item, *_PUNCTUATION)):
        return False
    return item.kind in (Kind.WORD, Kind.LETTERS, Kind.MARK) and item.text not in FUNCTIONS


def _are_words(runs: list[str], alone: bool) -> bool:
    """Whether runs of letters without any mathematics are words."""
    if alone:
        return bool(runs) and _is_word_alone(runs[0])
    return any(looks_like_word(run) or run.lower() in ("yes", "no", "not") for run in runs)


def _is_word_alone(run: str) -> bool:
    if run in FUNCTIONS or run == "pi":
        return False
    if len(run) < 3:
        return run.lower() in _SHORT_WORDS and (run.islower() or run.lower() in ("no", "ok"))
    return any(letter in _VOWELS for letter in run) and not _is_alphabetical(run)


def _is_alphabetical(run: str) -> bool:
    """Whether the letters of a run are neighbours in the alphabet, as of variables or points: abc, zyx, BCDA."""
    codes = sorted(map(ord, run))
    return codes == list(range(codes[0], codes[0] + len(codes)))
