"""Sets of words, written as text."""

from __future__ import annotations


def vocabulary(*texts: str) -> frozenset[str]:
    """The words of texts, which white space separates."""
    return frozenset(" ".join(texts).split())
