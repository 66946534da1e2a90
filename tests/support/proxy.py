"""A TCP proxy between a client and Redis that loses and delays what a network loses and delays.

    with Proxy(redis_server.port) as proxy:
        proxy.lose_reply(of="acquire")        # executed, but nobody hears of it
        ...                                   # use proxy.url

Each connection is relayed command by command, so a fault hits one command and no other. Script
calls are known by their verb (`acquire`, `release` …), other commands by their name (`INFO`).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from celery_relock.backends.redis.scripts import scripts
from tests.support.tcp import hang_up

_log = logging.getLogger(__name__)  # why a connection ended, beside a test that failed
_log.addHandler(logging.NullHandler())
_BY_SHA = {script.sha.encode(): name for name, script in scripts().items()}
_BY_SOURCE = {script.source.encode(): name for name, script in scripts().items()}
_VERBS = frozenset(scripts())


@dataclass
class Held:
    """A command that was held back on its way to the server, its sender none the wiser."""

    verb: str
    arrived: threading.Event = field(default_factory=threading.Event)
    _raw: bytes = b""
    _port: int = 0

    def deliver(self) -> bytes:
        """Let it reach the server now, on a connection of its own. Returns the raw reply."""
        assert self.arrived.wait(30), f"no {self.verb} came by"
        with socket.create_connection(("127.0.0.1", self._port)) as server:
            server.sendall(self._raw)
            return read_value(server.makefile("rb"))


@dataclass
class _Rule:
    wanted: Callable[[str, bytes], bool]
    act: str
    skip: int
    held: Held | None = None


class Proxy:
    """A proxy on a free port of 127.0.0.1.

    Attributes:
        url: of Redis, through the proxy.
        seen: the script calls that came by, in their order.
        deaf: True swallows everything that is published, as if the messages were lost.
        delay: seconds by which each answer is late.
    """

    def __init__(self, port: int):
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.seen: list[str] = []
        self.deaf = False
        self.delay = 0.0
        self._open = True
        self._is_over = False
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._pairs: list[tuple[socket.socket, socket.socket, list[str]]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_reply(self, of: str = "", after: int = 0) -> None:
        """The next script call (or the next of that verb) is executed, then its connection ends.

        Args:
            after: so many are let through before.
        """
        self._add(of, "lose reply", after)

    def lose_command(self, of: str = "", after: int = 0) -> None:
        """The same, but the command never reaches the server."""
        self._add(of, "lose command", after)

    def hold(self, of: str = "", after: int = 0, text: str = "") -> Held:
        """The same, but the command stays on its way until `Held.deliver`; no answer ever comes.

        Args:
            text: the command has it, as the name of a lock: others let theirs go meanwhile.
        """
        held = Held(of, _port=self._port)
        self._add(of, "hold", after, held, text.encode())
        return held

    def forget(self) -> None:
        """The faults that were asked for and have not come to pass are not wanted any more."""
        with self._lock:
            self._rules.clear()

    @property
    def idle(self) -> bool:
        """Whether every fault that was asked for has come to pass."""
        with self._lock:
            return not self._rules

    def cut(self, only_pubsub: bool = False) -> int:
        """End every connection, or those that have subscribed. Returns how many."""
        with self._lock:
            cut = [pair for pair in self._pairs if not only_pubsub or "pubsub" in pair[2]]
            self._pairs = [pair for pair in self._pairs if pair not in cut]
        hang_up([server for _, server, _ in cut])
        for client, server, _ in cut:
            _end(client)
            _end(server)
        return len(cut)

    def refuse(self) -> None:
        """End every connection and take no new one: the server is unreachable."""
        with self._lock:  # a connection that is being made is cut, or sees that it is too late
            self._open = False
        self.cut()

    def accept(self) -> None:
        """Take connections again."""
        self._open = True

    def close(self) -> None:
        self._is_over = True
        self.refuse()
        self._listener.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(
        self, of: str, act: str, after: int, held: Held | None = None, text: bytes = b""
    ) -> None:
        def wanted(verb: str, raw: bytes) -> bool:
            return (verb == of if of else verb in _VERBS) and text in raw

        with self._lock:
            self._rules.append(_Rule(wanted, act, after, held))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._port))
                except OSError as error:
                    _log.warning("no way to the server: %r", error)
                    _end(client)
                    continue
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        marks: list[str] = []
        try:
            with self._lock:
                if not self._open:
                    raise ConnectionRefusedError
                self._pairs.append((client, server, marks))
            self._relay(client, server, marks)
        except (OSError, EOFError, ValueError) as error:
            if not self._is_over:  # it would be in the log of the next test
                _log.warning("%s: the connection ends: %r", self.url, error)
        _end(client)
        _end(server)

    def _relay(self, client: socket.socket, server: socket.socket, marks: list[str]) -> None:
        asked, answered = client.makefile("rb"), server.makefile("rb")
        while True:
            raw, verb = read_command(asked)
            if verb in ("SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE"):
                marks.append("pubsub")
                threading.Thread(target=self._push, args=(answered, client), daemon=True).start()
            rule = self._rule_for(verb, raw)
            if rule is not None and rule.act == "lose command":
                return
            if rule is not None and rule.held is not None:
                rule.held._raw = raw
                rule.held.arrived.set()
                asked.read(1)  # until the client has had enough of waiting
                return
            server.sendall(raw)
            if "pubsub" in marks:
                continue
            reply = read_value(answered)
            if rule is not None:
                return
            time.sleep(self.delay)
            client.sendall(reply)

    def _push(self, answered: BinaryIO, client: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                value = read_value(answered)
                if not (self.deaf and b"\r\nmessage\r\n" in value):
                    client.sendall(value)
        _end(client)

    def _rule_for(self, verb: str, raw: bytes) -> _Rule | None:
        with self._lock:
            if verb in _VERBS:
                self.seen.append(verb)
            for rule in self._rules:
                if rule.wanted(verb, raw):
                    if rule.skip > 0:
                        rule.skip -= 1
                        continue
                    self._rules.remove(rule)
                    return rule
        return None


def read_command(stream: BinaryIO) -> tuple[bytes, str]:
    """One command as it was sent, and the verb (or the command's name) that it carries."""
    raw = read_value(stream)
    parts = raw.split(b"\r\n")
    name, first = parts[2].upper(), parts[4] if len(parts) > 4 else b""
    if name == b"EVALSHA":
        return raw, _BY_SHA.get(first, "EVALSHA")
    if name == b"EVAL":
        found = next((verb for source, verb in _BY_SOURCE.items() if source in raw), "EVAL")
        return raw, found
    return raw, name.decode()


def read_value(stream: BinaryIO) -> bytes:
    """One whole value of the Redis protocol (RESP 2 or 3), unparsed."""
    head = stream.readline()
    if not head.endswith(b"\r\n"):
        raise EOFError
    kind, size = head[:1], head[1:-2]
    if kind in b"$=!":
        return head if size == b"-1" else head + _exactly(stream, int(size) + 2)
    if kind in b"*~>%":
        count = max(int(size), 0) * (2 if kind == b"%" else 1)
        return head + b"".join(read_value(stream) for _ in range(count))
    return head


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _end(connection: socket.socket) -> None:
    # Shut down, not only closed: the other thread that reads from it must wake.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
