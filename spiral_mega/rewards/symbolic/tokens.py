"""LaTeX text to tokens: numbers, runs of letters, commands, marks and words; styling and spacing
are dropped.

Math mode and text mode differ: in math mode `cm` is a run of letters, in text mode (\\text{cm}, or
outside of $...$) it is a word.
"""

from __future__ import annotations

import re
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from spiral_mega.rewards.symbolic.characters import to_latex
from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.literals import read_literal
from spiral_mega.rewards.symbolic.vocabulary import vocabulary


class Kind(Enum):
    """What a token is."""

    NUMBER = 1
    LETTERS = 2  # a run of letters in math mode
    COMMAND = 3  # \alpha, without the backslash
    MARK = 4  # one sign: + - ( ) { } = , and the like
    WORD = 5  # a word in text mode, or letters of another script
    BEGIN = 6  # \begin of the environment named by `text`
    END = 7


class Token(NamedTuple):
    """One token. `spaced` says that white space came before it; `value` and `places` are a NUMBER's."""

    kind: Kind
    text: str
    spaced: bool = False
    value: Fraction | None = None
    places: int | None = None


FUNCTIONS = vocabulary(
    """
    sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth ln log
    lg exp max min gcd lcm sqrt abs det Re Im arg
    """
)
_SYNONYMS = {
    **dict.fromkeys(["dfrac", "tfrac", "cfrac", "nicefrac", "sfrac", "flatfrac"], "frac"),
    **dict.fromkeys(["dbinom", "tbinom"], "binom"),
    **dict.fromkeys(["leq", "leqslant", "leqq"], "le"),
    **dict.fromkeys(["geq", "geqslant", "geqq"], "ge"),
    **dict.fromkeys(["emptyset", "empty"], "varnothing"),
    **dict.fromkeys(["dots", "cdots", "dotsc", "dotsb", "hdots", "dotso"], "ldots"),
    **dict.fromkeys(["simeq", "thickapprox", "approxeq"], "approx"),
    **dict.fromkeys(["rightarrow", "longrightarrow"], "to"),
    **dict.fromkeys(["textdegree"], "degree"),
    **dict.fromkeys(["infin", "infinity"], "infty"),
    "neq": "ne",
    "varphi": "phi",
    "varepsilon": "epsilon",
    "vartheta": "theta",
    "bullet": "cdot",
    "backslash": "setminus",
    "smallsetminus": "setminus",
    "vee": "lor",
    "wedge": "land",
    "bigcup": "cup",
    "bigcap": "cap",
    "bmod": "mod",
    "tg": "tan",
    "ctg": "cot",
    "arctg": "arctan",
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "widehat": "hat",
    "widetilde": "tilde",
    "overarc": "wideparen",
}
_MARKS = {
    "lt": "<",
    "gt": ">",
    "ast": "*",
    "colon": ":",
    "lbrace": "\\{",
    "rbrace": "\\}",
    "lbrack": "[",
    "rbrack": "]",
    "vert": "|",
    "prime": "'",
    "textpercent": "%",
    "triangleq": "=",
    "textdollar": "$",
    "euro": "€",
    "texteuro": "€",
    "pounds": "£",
    "textsterling": "£",
    "yen": "¥",
    "newline": "\\\\",
    "cr": "\\\\",
    "quad": "\\quad",
    "qquad": "\\quad",
}
_DROPPED = vocabulary(
    """
    left right middle big Big bigg Bigg bigl bigr bigm Bigl Bigr Bigm biggl biggr Biggl Biggr
    displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits mathstrut strut nobreak
    allowbreak rm bf it sf tt boldmath large Large LARGE huge Huge small tiny normalsize
    footnotesize notag nonumber hline hfill noindent centering underline uline mathbf boldsymbol
    bm mathit mathsf mathtt mathnormal pmb ensuremath mathord mathop mathrel mathbin smash boxed
    fbox framebox bfseries itshape thinspace medspace thickspace enspace negthinspace
    textasciitilde
    """
)
_DROPPED_WITH_ARGUMENT = vocabulary(
    """
    color textcolor colorbox hspace vspace hskip kern phantom hphantom vphantom label tag bbox
    """
)
_TEXT_MODE = vocabulary(
    """
    text textbf textit textrm textsf texttt textnormal textup emph mbox hbox mathrm operatorname
    textsc
    """
)
_ALPHABETS = frozenset({"mathbb", "mathcal", "mathfrak", "mathscr", "Bbb"})
_VERTICAL = {
    "left": "lvert",
    "bigl": "lvert",
    "Bigl": "lvert",
    "right": "rvert",
    "bigr": "rvert",
    "Bigr": "rvert",
}

_SPACE = re.compile(r"(?:\s|~)+")
_SPACE_OR_NOTHING = re.compile(r"\s*")
_DOLLARS = re.compile(r"(?<!\\)\$+")
_LETTERS = re.compile(r"[A-Za-z]+")
_VOWEL_SIGNS = (
    "\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0903"
    "\u093a-\u094f\u0980-\u0dff\u0e31-\u0e4e\u1000-\u109f"
)
_FOREIGN = re.compile(rf"(?:[^\W\d_A-Za-z]|[{_VOWEL_SIGNS}])+")
_WORD = re.compile(rf"(?:[^\W\d_]|[{_VOWEL_SIGNS}])+(?:['-][^\W\d_]+)*")
_COMMAND = re.compile(r"\\([A-Za-z]+)\*?|\\(.)", re.DOTALL)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_OPTION = re.compile(r"\s*\[[^\]]*\]")
_POSITION = re.compile(r"\s*\[[tbc]\]")
_LENGTH = re.compile(r"\s*-?[\d.]+\s*(?:em|ex|pt|cm|mm|mu|in)?")
_APPLIED = re.compile(r"\s*[({_^]|\\left")
_DIGRAPHS = {
    "**": (Kind.MARK, "^"),
    "<=": (Kind.COMMAND, "le"),
    ">=": (Kind.COMMAND, "ge"),
    "!=": (Kind.COMMAND, "ne"),
    "==": (Kind.MARK, "="),
    "...": (Kind.COMMAND, "ldots"),
}


def tokenize(text: str, thousands: bool = True) -> list[Token]:
    """Split LaTeX text into tokens. `thousands` reads 1,234 as one number outside of parentheses.

    Text with $...$ and words outside of it is prose: it is read in text mode outside of the dollar
    signs. Raises AnswerError for a group that is not closed.
    """
    lexer = _Lexer(thousands)
    text = to_latex(text)
    segments = _DOLLARS.split(text)
    outside = "".join(segments[::2])
    if (
        len(segments) % 2
        and len(segments) > 1
        and re.search(r"[^\W\d_]", outside)
        and "\\" not in outside
    ):
        lexer.read(text, text_mode=True)
    else:
        lexer.read(" ".join(segments), text_mode=False)
    return lexer.tokens


@lru_cache(maxsize=4096)
def spell_out(latex: str) -> str:
    """Spell LaTeX text out as `spelling` does; without white space alone if its groups are not closed."""
    try:
        return spelling(tokenize(latex))
    except AnswerError:
        return "".join(latex.split())


def spelling(tokens: list[Token]) -> str:
    """Spell tokens out; equal for texts that differ only in styling, spaces and the braces of one-letter scripts."""
    parts: list[str] = []
    bare = _without_script_braces(tokens)
    for token, following in zip(bare, [*bare[1:], None], strict=True):
        parts.append(f"\\{token.text}" if token.kind is Kind.COMMAND else token.text)
        if token.kind is Kind.NUMBER and following is not None and following.kind is Kind.NUMBER:
            parts.append(" ")
    return "".join(parts)


def _without_script_braces(tokens: list[Token]) -> list[Token]:
    """x^{2} as x^2. Longer scripts keep their braces: x^{ab} is not x^ab."""
    bare: list[Token] = []
    index = 0
    while index < len(tokens):
        mark, opening, inner, closing = [*tokens[index : index + 4], *[None] * 4][:4]
        braced = (
            mark is not None
            and mark.text in ("^", "_")
            and opening is not None
            and opening.text == "{"
        )
        short = inner is not None and (len(inner.text) == 1 or inner.kind is Kind.COMMAND)
        if braced and short and closing is not None and closing.text == "}":
            bare.extend((tokens[index], tokens[index + 2]))
            index += 4
        else:
            bare.append(tokens[index])
            index += 1
    return bare


class _Lexer:
    """The tokens so far, and how deep in brackets the last one is."""

    def __init__(self, thousands: bool) -> None:
        self.tokens: list[Token] = []
        self._thousands = thousands
        self._depth = 0
        self._spaced = False

    def read(self, text: str, text_mode: bool) -> None:
        """Append the tokens of `text`; in text mode, $...$ is in math mode."""
        if not text_mode:
            self._read_segment(text, text_mode=False)
            return
        for index, segment in enumerate(_DOLLARS.split(text)):
            self._read_segment(segment, text_mode=index % 2 == 0)

    def _read_segment(self, text: str, text_mode: bool) -> None:
        position = 0
        while position < len(text):
            position = self._read_one(text, position, text_mode)

    def _read_one(self, text: str, position: int, text_mode: bool) -> int:
        """Append the token at `position`, if there is one, and return where the next begins."""
        if space := _SPACE.match(text, position):
            self._spaced = True
            return space.end()
        if literal := read_literal(text, position, self._thousands and self._depth == 0):
            token_text = text[position : literal.end]
            self._append(Kind.NUMBER, token_text, literal.value, literal.places)
            return literal.end
        if text[position] == "\\":
            return self._read_command(text, position, text_mode)
        if letters := (_WORD if text_mode else _LETTERS).match(text, position):
            self._append(Kind.WORD if text_mode else Kind.LETTERS, letters[0])
            return letters.end()
        if letters := _FOREIGN.match(text, position):
            self._append(Kind.WORD, letters[0])
            return letters.end()
        return self._read_mark(text, position)

    def _read_mark(self, text: str, position: int) -> int:
        for digraph, (kind, replacement) in _DIGRAPHS.items():
            if text.startswith(digraph, position):
                self._append(kind, replacement)
                return position + len(digraph)
        mark = text[position]
        if mark not in '"`':
            self._append(Kind.MARK, mark)
        return position + 1

    def _read_command(self, text: str, position: int, text_mode: bool) -> int:
        match = _COMMAND.match(text, position)
        if match is None:  # a backslash ends the text
            return len(text)
        end = match.end()
        if match[2] is not None:
            return self._read_control_symbol(match[2], end)
        name = _SYNONYMS.get(match[1], match[1])
        if name in _TEXT_MODE:
            return self._read_text(name, text, end)
        if name in _DROPPED_WITH_ARGUMENT:
            return _skip_argument(name, text, end)
        if name in _VERTICAL and text[end : end + 1] in ("|", "."):
            if text[end] == "|":
                self._append(Kind.MARK, _VERTICAL[name])
            return end + 1
        if name in _DROPPED:
            return end
        if name in ("begin", "end"):
            return self._read_environment(name, text, end)
        if name in _ALPHABETS:
            return self._read_alphabet(name, text, end)
        self._append(*((Kind.MARK, _MARKS[name]) if name in _MARKS else (Kind.COMMAND, name)))
        return _SPACE_OR_NOTHING.match(text, end).end()  # type: ignore[union-attr]  # matches the empty text

    def _read_control_symbol(self, symbol: str, end: int) -> int:
        if symbol in "{}|\\":
            self._append(Kind.MARK, "\\" + symbol)
        elif symbol in "$%&#_":
            self._append(Kind.MARK, symbol)
        else:  # spacing: \, \; \! \: and a backslash before a space
            self._spaced = True
        return end

    def _read_text(self, name: str, text: str, position: int) -> int:
        """\\text{...}, \\mathrm{...} and the like: their content in text mode, but functions and e, i, d are math."""
        content, end = _argument(text, position)
        bare = content.strip()
        if bare in FUNCTIONS and not (bare in ("min", "sec") and not _APPLIED.match(text, end)):
            self._append(Kind.COMMAND, bare)
        elif name in ("mathrm", "operatorname") and bare in ("e", "i", "d"):
            self._append(Kind.LETTERS, bare)
        else:
            self.read(content, text_mode=True)
        return end

    def _read_environment(self, name: str, text: str, position: int) -> int:
        content, end = _argument(text, position)
        environment = content.strip().rstrip("*")
        self._append(Kind.BEGIN if name == "begin" else Kind.END, environment)
        if name == "begin" and (option := _POSITION.match(text, end)):
            end = option.end()
        if name == "begin" and environment in ("array", "tabular"):
            end = _argument(text, end)[1]
        return end

    def _read_alphabet(self, name: str, text: str, position: int) -> int:
        content, end = _argument(text, position)
        alphabet = "mathbb" if name == "Bbb" else name
        self._append(Kind.COMMAND, f"{alphabet} {content.strip()}")
        return end

    def _append(
        self, kind: Kind, text: str, value: Fraction | None = None, places: int | None = None
    ) -> None:
        if text in ("(", "[", "\\{", "langle"):
            self._depth += 1
        elif text in (")", "]", "\\}", "rangle"):
            self._depth -= 1
        self.tokens.append(Token(kind, text, self._spaced, value, places))
        self._spaced = False


def _argument(text: str, position: int) -> tuple[str, int]:
    """The content of the group {...} at `position` (or else the one sign there), and where it ends."""
    position = _SPACE_OR_NOTHING.match(text, position).end()  # type: ignore[union-attr]  # matches the empty text
    if position >= len(text):
        raise AnswerError("a command lacks its argument")
    if text[position] != "{":
        command = _COMMAND.match(text, position)
        end = command.end() if command else position + 1
        return text[position:end], end
    depth = 0
    for token in _BRACE.finditer(text, position):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return text[position + 1 : token.start()], token.end()
    raise AnswerError("a group is not closed")


def _skip_argument(name: str, text: str, position: int) -> int:
    """Where what follows \\color{red}, \\hspace{1em} or \\kern 1em begins."""
    if option := _OPTION.match(text, position):
        position = option.end()
        if name == "bbox":
            return position
    if name in ("hskip", "kern") and (length := _LENGTH.match(text, position)):
        return length.end()
    return _argument(text, position)[1]
