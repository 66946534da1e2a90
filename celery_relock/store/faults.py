"""What redis-py raises, in this library's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis.exceptions as errors

from ..errors import LockConfigError, LockUnavailable, RelockError

_FOR_NOW = (
    "READONLY",
    "OOM",
    "LOADING",
    "MASTERDOWN",
    "BUSY",
    "NOREPLICAS",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "MISCONF",
)


def _code(error: Exception) -> str:
    text = str(error)
    for code in (*_FOR_NOW, "WRONGTYPE", "NOPERM", "RELOCK-FOREIGN"):
        if code in text:
            return code
    return ""


def repeatable(error: Exception) -> bool:
    """Whether the same command may go through on a new connection."""
    if isinstance(error, errors.AuthenticationError):
        return False
    if isinstance(error, errors.ConnectionError | errors.TimeoutError | OSError):
        return True
    return _code(error) in ("READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN")


def translate(error: Exception, *, where: str) -> RelockError:
    """The error to raise instead. `where`: the verb that failed."""
    code = _code(error)
    if repeatable(error) or code in _FOR_NOW:
        return LockUnavailable(f"{where}: {error}")
    if code in ("WRONGTYPE", "RELOCK-FOREIGN"):
        return LockConfigError(f"{where}: somebody else's key; set relock_namespace: {error}")
    return LockConfigError(f"{where}: {error}")


def check_server(info: Mapping[str, Any]) -> None:
    """Raises LockConfigError for a server older than 6.2."""
    version = str(info.get("redis_version", "6.2"))
    if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
        raise LockConfigError(f"Redis {version} is too old: 6.2 or newer is needed")
