"""What the nodes of a cluster say of slots that they do not have."""

from __future__ import annotations

from typing import NamedTuple

import redis
from redis.exceptions import ResponseError

from ..errors import LockUnavailable, RelockError
from .faults import translate
from .scripts import Script


class Redirection(NamedTuple):
    """What a node says that does not have the slot. `once`: while the slot is on its way there."""

    host: str
    port: int
    once: bool


def redirection(error: BaseException) -> Redirection | None:
    """Where a command belongs, if the error says so."""
    if not isinstance(error, ResponseError):
        return None
    # redis-py's parser for clusters takes the first word off and keeps it in the class.
    text, kind = str(error), type(error).__name__
    word, _, rest = text.partition(" ")
    if word not in ("MOVED", "ASK"):
        if kind not in ("MovedError", "AskError"):
            return None
        word, rest = ("ASK" if kind == "AskError" else "MOVED"), text
    host, _, port = rest.rpartition(" ")[2].rpartition(":")
    return Redirection(host, int(port), word == "ASK") if port.isdecimal() else None


def is_unstable(error: BaseException) -> bool:
    """Whether a slot is on its way and only some of the keys are there."""
    return isinstance(error, redis.exceptions.TryAgainError) or str(error).startswith("TRYAGAIN")


def is_unserved(error: Exception) -> bool:
    """Whether nobody has the slot, as far as this process knows."""
    return isinstance(error, LockUnavailable) and error.__cause__ is None


def cause_of(error: Exception) -> Exception:
    """What redis-py raised."""
    cause = error.__cause__
    return cause if isinstance(error, RelockError) and isinstance(cause, Exception) else error


def translated(error: Exception, script: Script) -> RelockError:
    """The error to raise for an outcome."""
    cause = cause_of(error)
    if redirection(cause) is not None:
        found: RelockError = LockUnavailable(
            f"{script.name}: the nodes of the Redis cluster do not agree on who has this slot: "
            f"see CLUSTER NODES at each ({cause})"
        )
    else:
        found = translate(error, where=script.name)
    if found is not error:
        found.__cause__ = cause
    return found
