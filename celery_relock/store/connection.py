"""Connections that are kept, and commands that are sent again when an answer is lost.

A pooled call of redis-py costs more than the script it runs; a kept connection with a packed
command beats it by half (`benchmarks/`). That is only sound because every verb may be sent twice:
a kept connection that was in use just now is not checked, it is replaced when it fails.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.connection import PythonRespSerializer
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as ReadTimeout

from ..engine import platform
from ..errors import RelockError
from . import wire
from .busy_poll import BusyPoll
from .faults import repeatable, translate
from .scripts import Script
from .wire import Call

# How long a command is repeated before the server counts as unreachable, in seconds.
PATIENCE = 2.0
_PAUSES = (0.0, 0.05, 0.1, 0.2, 0.4)
# How long a caller waits for an answer when another one has just waited in vain.
_BRIEF = 1.0
# What redis-py and its sockets raise. Anything else was thrown in from outside, such as a soft time
# limit: it goes on as it is, or the task would fail by another error and keep its lock.
_OWN = (RedisError, OSError, ValueError, TypeError, AttributeError)
# A connection that was idle for so many seconds is looked at before use.
_FRESH = 1.0


class Tries(int):
    """How often a command was sent; `at`: when the try was sent that was answered."""

    at: float

    def __new__(cls, count: int, at: float) -> Tries:
        made = super().__new__(cls, count)
        made.at = at
        return made


class Connections:
    """Runs scripts over connections of its own, made by the pool's factory.

    Threads and greenlets take a connection for the time of one call. A forked child starts with
    none, and never touches the sockets that it inherited.

    Args:
        pool: where connections come from: its class, address and options. Its own are not used.
        check: called with each new connection before its first command.
    """

    def __init__(
        self,
        pool: redis.ConnectionPool,
        check: Callable[[Any], None] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._pool = pool
        self._check = check
        self._patience = patience
        self._failed_at = -1e9
        self._pid = platform.pid
        self._idle: deque[tuple[float, Any]] = deque()

    def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str],
        send: wire.Send = wire.one,
    ) -> Any:
        """Run one script. Returns its reply, strings as bytes, and how often it was sent.

        Args:
            send: sends it and reads the answer, see `wire`.

        Raises:
            LockUnavailable, LockConfigError: translated from what redis-py raises.
        """
        packed = wire.pack(script, keys, args)
        return self._repeat(send, (packed, script, keys, args), script.name)

    def run_all(
        self, script: Script, calls: Sequence[Call], within: float | None = None
    ) -> list[Any]:
        """Run one script with many arguments on one connection, sent ahead of the answers.

        Args:
            within: seconds to wait for an answer, instead of the pool's timeouts.
        """

        replies: list[Any] = self._repeat(wire.several, (script, calls), script.name, within)[0]
        return replies

    def _repeat(
        self,
        send: Callable[..., Any],
        what: tuple[Any, ...],
        name: str,
        within: float | None = None,
    ) -> tuple[Any, int]:
        started = time.monotonic()
        patience, within, brief = self._terms(started, within)
        sent = 0
        while True:
            link, kept = self._take(started)
            try:
                if within is not None:
                    _hurry(link, within)
                if not kept and self._check is not None:
                    self._check(link)
                sent += 1
                at = time.monotonic()
                reply = send(link, *what)
            except RelockError:
                link.disconnect()
                raise
            except _OWN as error:
                again = repeatable(error)
                if sent and isinstance(error, ResponseError) and not again:
                    self._keep(link, started)  # the server is well and agreed with, it only said no
                else:
                    link.disconnect()
                now = time.monotonic()
                # A kept connection may have gone stale while nobody used it; that says nothing
                # about the server. One that is silent does.
                stale = kept and not (within and isinstance(error, ReadTimeout))
                if not again or (self._over(error, now - started, patience) and not stale):
                    self._failed_at = now if again else self._failed_at
                    raise translate(error, where=name) from error
                self.close()
                time.sleep(_PAUSES[min(sent, len(_PAUSES)) - 1] if sent else 0.05)
            except BaseException:
                # A signal in the middle of an answer: whoever came next would read the rest of it.
                link.disconnect()
                raise
            else:
                self._keep(link, started, brief)
                return reply, Tries(sent, at)

    def _terms(self, now: float, within: float | None) -> tuple[float, float | None, bool]:
        # After a failure the next caller does not go through all the patience again: giving back a
        # lock that could not be taken must not double the time in which nothing happens.
        if now - self._failed_at > 1.0:
            return self._patience, within, False
        return 0.0, within or _BRIEF, within is None

    def _over(self, error: Exception, since: float, patience: float) -> bool:
        """Whether a command that failed so is not repeated any more, after so many seconds."""
        return since >= patience

    def _take(self, now: float) -> tuple[Any, bool]:
        if self._pid != platform.pid:
            self._idle, self._pid = deque(), platform.pid
        while True:
            try:
                since, link = self._idle.pop()
            except IndexError:
                return self.make(), False
            # The server may have gone and come back in so long a time. Found out only by sending,
            # nobody could tell whether the command was executed.
            if now - since < _FRESH or _quiet(link):
                return link, True
            link.disconnect()

    def make(self) -> Any:
        """A connection of redis-py's, of which nobody here keeps account."""
        # Not by the pool's method: that counts each against its limit, and nobody uncounts.
        link = self._pool.connection_class(**self._pool.connection_kwargs)
        # hiredis 3.5's packer crashes the process when a signal (of a time limit) interrupts it.
        link._command_packer = PythonRespSerializer(link._buffer_cutoff, link.encoder.encode)
        link.busy_poll = BusyPoll()
        return link

    def _keep(self, link: Any, used: float, brief: bool = False) -> None:
        if brief:  # its timeouts are not those of the pool any more
            link.disconnect()
            return
        self._idle.append((used, link))

    def close(self) -> None:
        """Close what is idle. What is in use closes when its call fails."""
        while self._idle:
            try:
                self._idle.pop()[1].disconnect()
            except IndexError:
                return


def _hurry(link: Any, within: float) -> None:
    link.socket_timeout = link.socket_connect_timeout = within
    if (sock := getattr(link, "_sock", None)) is not None:
        sock.settimeout(within)


def _quiet(link: Any) -> bool:
    """Whether a kept connection is as it was left: the end of one that was closed can be read."""
    try:
        return not link.can_read(0)
    except _OWN:  # what it is does not matter: another link is made
        return False
