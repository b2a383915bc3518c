"""The one error of this package."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used as it is; the message names the file, the row, what is wrong and the remedy."""
