"""Errors a user can act on. Each message is one line that names what was wrong and what is allowed."""

from __future__ import annotations


class ServeLabError(Exception):
    """Base of every error shown to a user as one line, without a traceback."""


class ConfigError(ServeLabError):
    """A config, workload or sampling value that is unknown or impossible."""


class ModelError(ServeLabError):
    """A model that is missing, truncated, foreign, or whose parts disagree."""


class RequestError(ServeLabError):
    """A request that cannot be served: empty, longer than the context, or longer than the whole KV cache."""


class CapacityError(ServeLabError):
    """The device cannot hold what was asked of it; the message says what to lower."""


class EngineError(ServeLabError):
    """The engine failed in a step or was asked for something while it could not answer."""


class DatabaseError(ServeLabError):
    """A database that is read-only, newer than this program, or not one of ours."""
