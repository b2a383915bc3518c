"""The one error of this package."""

from spiral_mega.errors import UserError


class DataError(UserError):
    """Data that cannot be used as it is; the message names the file, the row, what is wrong and the remedy."""
