"""Why an answer cannot be read or compared."""

from __future__ import annotations


class AnswerError(ValueError):
    """The text is no expression that this package reads, or it is too large to evaluate."""
