"""Every error that nntile_py raises on purpose, so that a caller can catch them all as NNTileError."""


class NNTileError(Exception):
    """Base of all errors of nntile_py; its text is meant for the user."""


class ConfigError(NNTileError):
    """A configuration is wrong; the text names the key and what is allowed. Exit status 2."""


class TaskError(NNTileError):
    """A task failed; the text names the operator and what its kernel said."""
