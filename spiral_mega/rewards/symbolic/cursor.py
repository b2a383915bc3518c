"""A position in grouped tokens, from which a parser takes items, scripts and arguments."""

from __future__ import annotations

from fractions import Fraction

from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.groups import Group, Item, Items, is_group, is_mark
from spiral_mega.rewards.symbolic.tokens import FUNCTIONS, Kind, Token
from spiral_mega.rewards.symbolic.vocabulary import vocabulary

_NOT_ATOMS = vocabulary(
    """
    times cdot div pm mp le ge ne approx equiv in notin cup cap setminus to land lor sim cong
    mod pmod perp parallel implies Rightarrow Leftrightarrow iff subset subseteq ldots circ
    degree therefore because ni propto over choose ll gg models vdash mid begin end varnothing
    """
)
_WITH_ARGUMENTS = {"frac": 2, "binom": 2, "sqrt": 1}


class Cursor:
    """Grouped tokens, and the index `at` of the next one."""

    def __init__(self, items: Items) -> None:
        self.items = list(items)
        self.at = 0

    @property
    def item(self) -> Item | None:
        """The next item; None at the end."""
        return self.items[self.at] if self.at < len(self.items) else None

    def take(self) -> Item:
        """Return the next item and move on. Raises AnswerError at the end."""
        item = self.item
        if item is None:
            raise AnswerError("an operand is missing")
        self.at += 1
        return item

    def take_mark(self, *marks: str) -> bool:
        """Move on if the next item is one of these marks; whether it was."""
        found = is_mark(self.item, *marks)
        self.at += found
        return found

    def divide(self, token: Token, size: int) -> None:
        """Replace the token just taken by its first `size` characters, taken, and the rest, which comes next."""
        rest = _part(token, slice(size, None))
        self.items[self.at - 1 : self.at] = [_part(token, slice(size)), rest._replace(spaced=False)]

    def starts_atom(self) -> bool:
        """Whether the next item can begin an operand."""
        item = self.item
        if item is None:
            return False
        if isinstance(item, Group):
            return True
        if item.kind is Kind.COMMAND:
            return item.text not in _NOT_ATOMS and not item.text.startswith("mathbb")
        return item.kind in (Kind.NUMBER, Kind.LETTERS, Kind.WORD) or is_mark(item, "|")

    def script_items(self) -> Items:
        """What a ^ or _ applies to: a group, or one sign, letter, number or command with its arguments."""
        item = self.take()
        if isinstance(item, Group):
            return item.items if item.opening == "{" else (item,)
        if item.kind is Kind.MARK and item.text in "+-":
            return (item, *self.script_items())
        if item.kind is Kind.LETTERS and item.text not in FUNCTIONS and len(item.text) > 1:
            self.divide(item, 1)
            return (item._replace(text=item.text[0]),)
        if item.kind is Kind.COMMAND and item.text in _WITH_ARGUMENTS:
            start = self.at - 1
            for _ in range(_WITH_ARGUMENTS[item.text] + is_group(self.item, "[")):
                self.argument_items()
            return tuple(self.items[start : self.at])
        if item.kind is Kind.MARK and item.text != "'":
            raise AnswerError(f"a script cannot be {item.text}")
        return (item,)

    def argument_items(self, whole_number: bool = False) -> Items:
        """A command's argument: a group, or one digit, letter or command. `whole_number` takes all digits."""
        item = self.take()
        if isinstance(item, Group):
            return item.items if item.opening == "{" else (item,)
        if item.kind is not Kind.NUMBER or whole_number:
            self.at -= 1
            return self.script_items()
        if not item.text.isdecimal():
            raise AnswerError(f"{item.text} is no argument")
        if len(item.text) > 1:
            self.divide(item, 1)
        return (_part(item, slice(1)),)


def _part(token: Token, part: slice) -> Token:
    text = token.text[part]
    return token._replace(
        text=text, value=Fraction(int(text)) if token.kind is Kind.NUMBER else None
    )
