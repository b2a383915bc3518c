"""Errors that are the user's to mend: the command prints their text instead of a traceback."""


class UserError(ValueError):
    """Bad input. The text names the file, key or value, and what to do."""


class ConfigError(UserError):
    """A configuration that cannot be used as it is."""
