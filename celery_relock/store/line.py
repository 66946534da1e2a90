"""A connection that hears what is published to one inbox.

Not redis-py's PubSub, which takes longer than all else between a grant and its waiter.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import redis

from ..engine.protocol import Notice
from ..errors import LockUnavailable
from . import replies
from .faults import translate
from .wire import PING

# A connection whose other end is gone in silence: asked after so many seconds without a word, given
# up after so many.
_ASK, _GIVE_UP = 15.0, 30.0
# How often one to a master that may move is held against where that is now, in seconds.
_LOOK = 1.0


class Line:
    """One subscription, for one thread.

    Args:
        link: a connection of redis-py's that nobody else uses.

    Raises:
        LockUnavailable, LockConfigError: it cannot be had.
    """

    def __init__(self, link: Any, channel: str) -> None:
        self._link = link
        self._finder = getattr(link, "finder", None)
        self._heard = time.monotonic()
        self._buffer = b""
        self._patience = -1.0
        try:
            link.connect()
            self._sock: socket.socket = link._sock
            link.send_command("SUBSCRIBE", channel, check_health=False)
            while self._next(link.socket_timeout or _GIVE_UP)[:1] != [b"subscribe"]:
                pass
        except (OSError, redis.RedisError) as error:
            self.close()
            raise translate(error, where="listen") from error

    def hear(self, seconds: float) -> Notice | None:
        """The next notice, or None after so many seconds or for anything else that came.

        Raises:
            LockUnavailable: the connection is gone, or leads to what is the master no more: a
                replica repeats the messages, but the master does not know that it is heard.
        """
        if self._finder is not None:
            if self._finder.address != (self._link.host, self._link.port):
                raise LockUnavailable("the inbox's server is the master no more")
            seconds = min(seconds, _LOOK)
        try:
            word = self._next(seconds)
        except TimeoutError:
            self._ask_after_silence()
            return None
        except (OSError, redis.RedisError) as error:
            raise LockUnavailable(f"the inbox lost its connection: {error}") from error
        # An empty one asks whether anybody hears.
        return replies.notice(word[2]) if word[:1] == [b"message"] and word[2] else None

    def close(self) -> None:
        self._link.disconnect()

    def _ask_after_silence(self) -> None:
        silent = time.monotonic() - self._heard
        if silent > _GIVE_UP:
            raise LockUnavailable("the inbox's connection no longer answers")
        if silent > _ASK:
            with contextlib.suppress(OSError):  # then it stays silent
                self._sock.sendall(PING)

    def _next(self, seconds: float) -> list[Any]:
        """The next message or answer of the server's, in parts."""
        if seconds != self._patience:  # it asks the system
            self._patience = seconds
            self._sock.settimeout(max(seconds, 0.001))
        while True:
            try:
                word, end = _parse(self._buffer, 0)
            except _Short:
                data = self._sock.recv(65536)
                if not data:
                    raise redis.ConnectionError("closed by the server") from None
                self._buffer += data
                self._heard = time.monotonic()
            else:
                self._buffer = self._buffer[end:]
                return word if isinstance(word, list) else [word]


class _Short(Exception):
    """The rest has not come yet."""


def _parse(data: bytes, at: int) -> tuple[Any, int]:
    """One value of RESP 2 or 3, as far as a subscriber is sent any, and where the next begins."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise _Short
    kind, head, at = data[at : at + 1], data[at + 1 : end], end + 2
    if kind in (b"*", b">"):
        parts = []
        for _ in range(int(head)):
            part, at = _parse(data, at)
            parts.append(part)
        return parts, at
    if kind == b"$":
        end = at + max(int(head), 0)
        if len(data) < end + 2:
            raise _Short
        return data[at:end], end + 2
    if kind == b"-":
        raise redis.ResponseError(head.decode())
    if kind in (b":", b"+", b"_"):
        return head, at
    raise redis.ConnectionError(f"not an answer of Redis: {data[:40]!r}")
