"""Unicode in answers as LaTeX: √2, ½, x², −, ∞, full-width and invisible characters."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from spiral_mega.rewards.symbolic.vocabulary import vocabulary

_GREEK = vocabulary(
    """
    ALPHA BETA GAMMA DELTA EPSILON ZETA ETA THETA IOTA KAPPA LAMDA MU NU XI PI RHO SIGMA TAU
    UPSILON PHI CHI PSI OMEGA
    """
)
_SIGNS = {
    "-": "−–—‐‑‒﹣",
    "*": "∗",
    "/": "⁄∕",
    "'": "′’‘ʹ",
    "''": "″",
    '"': "“”„«»",
    ":": "∶",
    ",": "、",
    ".": "。",
    "|": "∣",
    "\\$": "＄",
    "\\%": "％",
    "\\times ": "×✕",
    "\\div ": "÷",
    "\\cdot ": "·⋅∙•",
    "\\pm ": "±",
    "\\mp ": "∓",
    "\\sqrt ": "√",
    "\\sqrt[3]": "∛",
    "\\sqrt[4]": "∜",
    "\\infty ": "∞",
    "\\le ": "≤⩽≦",
    "\\ge ": "≥⩾≧",
    "\\ne ": "≠",
    "\\approx ": "≈≃≅",
    "\\equiv ": "≡",
    "\\in ": "∈",
    "\\notin ": "∉",
    "\\cup ": "∪⋃",
    "\\cap ": "∩⋂",
    "\\setminus ": "∖",
    "\\subset ": "⊂",
    "\\subseteq ": "⊆",
    "\\varnothing ": "∅",
    "\\angle ": "∠",
    "\\triangle ": "△",
    "\\perp ": "⊥",
    "\\parallel ": "∥",
    "\\sum ": "∑",
    "\\prod ": "∏",
    "\\int ": "∫",
    "\\partial ": "∂",
    "\\land ": "∧",
    "\\lor ": "∨",
    "\\to ": "→",
    "\\ldots ": "…⋯",
    "\\lfloor ": "⌊",
    "\\rfloor ": "⌋",
    "\\lceil ": "⌈",
    "\\rceil ": "⌉",
    "\\langle ": "⟨〈",
    "\\rangle ": "⟩〉",
    "\\mathbb{R}": "ℝ",
    "\\mathbb{Z}": "ℤ",
    "\\mathbb{N}": "ℕ",
    "\\mathbb{Q}": "ℚ",
    "\\mathbb{C}": "ℂ",
    "^\\circ ": "°º˚",
    "^\\circ C": "℃",
    "^\\circ F": "℉",
    "\\Delta ": "∆",
    "\\hbar ": "ℏ",
}
_LATEX = {character: latex for latex, characters in _SIGNS.items() for character in characters}
_OVERLINED = re.compile("(?:\\d\u0305)+")
_SCRIPTS = {
    "<super": ("^{", "\x01}"),
    "<sub": ("_{", "\x02}"),
}  # the marks say which neighbours are one script


@lru_cache(maxsize=1024)
def to_latex(text: str) -> str:
    """Rewrite Unicode signs as LaTeX commands; drop characters without width; letters of other scripts stay."""
    if text.isascii():
        return text
    text = _OVERLINED.sub(lambda run: "\\overline{" + run[0].replace("\u0305", "") + "}", text)
    latex = "".join(map(_character, text))
    for opening, closing in _SCRIPTS.values():  # x¹² is x^{12}
        latex = latex.replace(closing + opening, "").replace(closing, "}")
    return latex


@lru_cache(maxsize=1024)
def _character(character: str) -> str:
    if character.isascii():
        return character
    if character in _LATEX:
        return _LATEX[character]
    category = unicodedata.category(character)
    if category in ("Cf", "Cc"):
        return ""
    if category == "Zs":
        return " "
    style = unicodedata.decomposition(character).partition(">")[0]
    plain = unicodedata.normalize("NFKC", character)
    if style in _SCRIPTS:
        opening, closing = _SCRIPTS[style]
        return opening + "".join(map(_character, plain)) + closing
    if style == "<fraction":
        numerator, _, denominator = plain.partition("⁄")
        return f"\\frac{{{numerator}}}{{{denominator}}}"
    if category == "Nd":
        return str(unicodedata.decimal(character))
    return _greek_command(plain) or plain


def _greek_command(character: str) -> str:
    """The command of a Greek letter, or ""."""
    words = unicodedata.name(character, "").split() if len(character) == 1 else []
    letters = [word for word in words if word in _GREEK]
    if "GREEK" not in words or not letters or "WITH" in words:
        return ""
    letter = letters[-1].replace("LAMDA", "LAMBDA").lower()
    return "\\" + (letter.title() if "CAPITAL" in words else letter) + " "
