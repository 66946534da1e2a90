"""Whether this client and a server agree: on the server's age, and on where the locks are."""

from __future__ import annotations

from typing import Any

import redis

from ..engine.events import logger
from ..errors import LockConfigError
from .faults import check_server, translate
from .keyspace import SCHEMA, Keyspace


def see_version(link: Any) -> None:
    """Ask for the server's version, on a new connection.

    Raises:
        LockConfigError: it is too old.
    """
    link.send_command("INFO", "server", check_health=False)
    try:
        info = link.read_response(disable_decoding=True)
    except redis.ResponseError as error:
        if "NOPERM" not in str(error).upper() and "no permissions" not in str(error).lower():
            raise  # not allowed to ask is no reason to stop
    else:
        check_server(_fields(info))


def arguments(keys: Keyspace) -> tuple[str, str]:
    """Of the script `open`."""
    return str(SCHEMA), str(keys.buckets)


def agree(keys: Keyspace, reply: Any) -> None:
    """What `open` replied.

    Raises:
        LockConfigError: the locks of the namespace are elsewhere, or in another form.
    """
    if reply[0] != b"OK":
        raise LockConfigError(
            f"relock_namespace={keys.namespace!r} holds locks of another layout "
            f"(schema {reply[1].decode()}, {reply[2].decode()} buckets; this is schema "
            f"{SCHEMA}, {keys.buckets} buckets): run one version of celery-relock, "
            "or give this one a namespace of its own"
        )


def see_channels(link: Any, channel: str) -> None:
    """Warn where messages cannot be sent: scripts go on there, so it would never be told."""
    link.send_command("PUBLISH", channel, "", check_health=False)
    try:
        link.read_response(disable_decoding=True)
    except redis.ResponseError as error:
        logger.warning("waiters hear of their turn late: %s", translate(error, where="publish"))


def _fields(info: bytes | str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(info, dict):
        return info
    text = info.decode() if isinstance(info, bytes) else info
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
