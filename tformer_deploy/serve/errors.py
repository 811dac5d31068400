"""Errors of requests: which status each has, and its message."""

from __future__ import annotations

from ..base.errors import ArtifactError, ConfigError, DataError, EngineError, LimitError, TformerError
from ..translate.scheduler import Busy, Cancelled, Late
from .languages import UnknownPair
from .models import UnknownModel


class NoKey(TformerError):
    """The key is missing or wrong."""


class Forbidden(TformerError):
    """What this client may not do, with a key or without."""


class TooLarge(LimitError):
    """A body beyond the cap."""


class Absent(TformerError):
    """What this server does not have."""


class TooSlow(TformerError):
    """A body that does not come."""


STATUS: tuple[tuple[type[TformerError], int], ...] = (
    (TooLarge, 413),
    (TooSlow, 408),
    (Busy, 429),
    (Late, 504),
    (Cancelled, 499),
    (NoKey, 401),
    (Forbidden, 403),
    (Absent, 501),
    (UnknownModel, 404),
    (UnknownPair, 404),
    (ConfigError, 400),
    (LimitError, 422),
    (DataError, 422),
    (EngineError, 500),
    (ArtifactError, 500),
    (TformerError, 503),
)
"""The first that an error is of."""


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def message_of(error: BaseException) -> str:
    """One line on an error; what is no error of ours says only that it is one."""
    if not isinstance(error, TformerError):
        return "internal error: the server's log has it"
    return "".join(letter if letter.isprintable() else "?" for letter in str(error))  # it may quote the request
