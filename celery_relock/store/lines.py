"""An inbox in a cluster: a connection to each master, which hears for the buckets that it has.

The scripts count who hears a message, and a node knows only of its own listeners. So the lines
follow the buckets, when slots move and when a replica takes over. Meanwhile heartbeats find what
was missed.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from ..engine.protocol import Notice
from ..errors import LockUnavailable, RelockError
from . import replies
from .faults import translate
from .line import Line
from .nodes import Nodes
from .redirections import redirection
from .topology import Node

# How often the lines are held against what this process knows of the cluster, and how often it asks
# the cluster itself, in seconds.
_LOOK_EVERY, _ASK_EVERY = 0.5, 10.0
# How long a node may take to open a line, and how soon one that failed is tried again, in seconds.
_BRIEF, _AGAIN = 1.0, 2.0


class NodeLine(Line):
    """The line to one node, with a channel for each of its buckets.

    Raises:
        LockUnavailable, LockConfigError: it cannot be had.
    """

    def __init__(self, link: Any, channels: Sequence[str]) -> None:
        self.channels = channels
        self._link = link
        self._heard = time.monotonic()
        self._buffer = b""
        self._patience = -1.0
        # The others are not heard meanwhile.
        link.socket_connect_timeout = _BRIEF
        try:
            link.connect()
            self._sock = link._sock
            self._subscribe(channels)
        except (OSError, redis.RedisError) as error:
            self.close()
            if redirection(error) is not None:
                raise LockUnavailable(f"the inbox's slot has moved: {error}") from error
            raise translate(error, where="listen") from error

    def _subscribe(self, channels: Sequence[str]) -> None:
        # A server before 7.0, or a user without the permission, hears as everywhere.
        try:
            self._ask_for(b"ssubscribe", [channels[:1]])
        except redis.ResponseError as error:
            if redirection(error) is not None or "CLUSTERDOWN" in str(error):
                raise
            self._buffer = b""
            self._ask_for(b"subscribe", [channels])
        else:
            # One command is for one slot.
            self._ask_for(b"ssubscribe", [[channel] for channel in channels[1:]])

    def _ask_for(self, command: bytes, commands: Sequence[Sequence[str]]) -> None:
        packed = [self._link.pack_command(command.upper(), *names) for names in commands]
        self._link.send_packed_command([b"".join(part) for part in packed], check_health=False)
        left = sum(map(len, commands))
        while left:
            left -= self._next(_BRIEF)[:1] == [command]

    def fileno(self) -> int:
        """For a selector."""
        return self._sock.fileno()

    def notices(self) -> Iterator[Notice]:
        """What has come by now.

        Raises:
            LockUnavailable: the connection is gone, or a bucket has another node now.
        """
        with contextlib.suppress(TimeoutError):
            while True:
                try:
                    word = self._next(0.0)
                except TimeoutError:
                    raise
                except (OSError, redis.RedisError) as error:
                    raise LockUnavailable(f"the inbox lost its connection: {error}") from error
                if word[0] in (b"smessage", b"message") and word[2]:
                    if (notice := replies.notice(word[2])) is not None:
                        yield notice
                elif word[0] == b"sunsubscribe":
                    raise LockUnavailable("the inbox's slot has moved")

    def ask(self) -> None:
        """See that the connection still answers. Raises LockUnavailable if it does not."""
        self._ask_after_silence()


class Lines:
    """All lines of one inbox, for one thread.

    Args:
        channel: the name of the inbox's channel in a bucket.
    """

    def __init__(self, nodes: Nodes, channel: Callable[[int], str]) -> None:
        self._nodes = nodes
        self._topology = nodes.topology
        self._channel = channel
        self._lines: dict[Node, NodeLine] = {}
        self._version: int | None = None
        self._asked_at = self._again_at = 0.0

    def listen(self, ready: Callable[[], None], hear: Callable[[Notice], None]) -> None:
        """Hear for ever; `ready` is called whenever lines have been opened.

        Raises:
            LockUnavailable, LockConfigError: there is no line left, and none can be opened.
        """
        selector = selectors.DefaultSelector()
        try:
            while True:
                if self._follow(selector):
                    ready()
                heard = {id(key.fileobj) for key, _ in selector.select(_LOOK_EVERY)}
                for node, line in list(self._lines.items()):
                    try:
                        for notice in line.notices() if id(line) in heard else ():
                            hear(notice)
                        line.ask()
                    except LockUnavailable:
                        self._drop(selector, node)
                        self._again_at = self._asked_at = 0.0
        finally:
            for line in self._lines.values():
                line.close()
            selector.close()

    def _follow(self, selector: Any) -> bool:
        """See that there is a line for each bucket, at its master. True if one was opened."""
        now = time.monotonic()
        if now - self._asked_at >= _ASK_EVERY:
            self._asked_at = now
            with contextlib.suppress(LockUnavailable):  # the lines that are there still hear
                self._topology.look()
        if self._version == self._topology.version and now < self._again_at:
            return False
        self._version, self._again_at = self._topology.version, math.inf
        opened, failed = False, None
        masters = self._topology.masters()
        for node, buckets in masters.items():
            channels = [self._channel(bucket) for bucket in buckets]
            before = self._lines.get(node)
            if before is not None and before.channels == channels:
                continue
            try:
                line = NodeLine(self._nodes.make(node), channels)
            except RelockError as error:
                self._topology.silent(node)
                failed, self._again_at, self._asked_at = error, now + _AGAIN, 0.0
                continue
            # Only now: what is heard twice does no harm.
            if before is not None:
                self._drop(selector, node)
            self._lines[node] = line
            selector.register(line, selectors.EVENT_READ)
            opened = True
        for node in self._lines.keys() - masters.keys():
            self._drop(selector, node)
        if failed is not None and not self._lines:
            raise failed
        return opened

    def _drop(self, selector: Any, node: Node) -> None:
        line = self._lines.pop(node)
        selector.unregister(line)
        line.close()
