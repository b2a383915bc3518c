"""Errors that the user can fix: the command prints their text instead of a traceback."""


class UserError(ValueError):
    """Bad input. The text names the file, key or value, and the remedy."""


class ConfigError(UserError):
    """A configuration that cannot be used as it is."""


class DataError(UserError):
    """Data that cannot be used as it is. The text names the file and the row."""
