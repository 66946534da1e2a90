"""The questions of `relock doctor` to Redis, see `engine.inspection`. Loaded when needed.

Nothing is written. To find out whether a command is allowed, it is sent with a key that does not
exist and so that it has no effect: the server checks the permissions first.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from ...engine.inspection import Kind, Memory, Owed, ParkedTask, Server
from .connections import Command, Connections, Transport
from .errors import FAULTS, address_of, fields_of, forbids, reply_of
from .inspection import SCANNED, replies_of, scanned
from .keys import Keys
from .scripts import Script

_SECTIONS = ("server", "clients", "memory", "persistence", "replication", "cluster")
# Keys of a kind to measure.
_MEASURED = 20
# Parked messages of each lock to look at.
_PARKED_EACH = 10
_OURS = re.compile(r"(?P<namespace>[^\s{}]{1,60}):\{\d+\}:(?P<rest>.+)", re.DOTALL)
_KINDS = {
    **dict.fromkeys(("l", "e", "f", "o"), "locks"),
    **dict.fromkeys(("q", "w", "s", "sent", "passed"), "queues"),
    **dict.fromkeys(("m", "parked", "due", "owed"), "parked messages"),
    "d": "ended executions",
    "live": "workers",
    "meta": "meta",
}
_OF_A_KEY = ("DEL", "EXISTS", "GET", "HGETALL", "HLEN", "PERSIST", "PTTL", "ZCARD")
_OF_A_MEMBER = ("HDEL", "HEXISTS", "HGET", "HMGET", "HSTRLEN", "ZRANK", "ZREM", "ZSCORE")
_OF_A_RANGE = ("ZCOUNT", "ZRANGE", "ZRANGEBYSCORE", "ZREMRANGEBYSCORE", "ZREVRANGE")
# Each command of the scripts, with arguments that have no effect. "KEY" does not exist, and nobody
# listens at "CHANNEL".
_TRIED: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_OF_A_KEY, ("KEY",)),
    **dict.fromkeys(_OF_A_MEMBER, ("KEY", "-")),
    **dict.fromkeys(_OF_A_RANGE, ("KEY", "0", "0")),
    **dict.fromkeys(("PEXPIRE", "PEXPIREAT"), ("KEY", "1")),
    **dict.fromkeys(("PUBLISH", "SPUBLISH"), ("CHANNEL", "")),
    "HINCRBY": ("KEY", "-", "-"),  # not a number: refused, but after the permissions
    "HSET": ("KEY", "-", "-", "-"),  # a value is missing: refused, but after the permissions
    "PUBSUB": ("NUMSUB", "CHANNEL"),
    "SET": ("KEY", "-", "XX"),
    "TIME": (),
    "ZADD": ("KEY", "XX", "1", "-"),
    "ZREVRANGEBYLEX": ("KEY", "+", "-"),
}
# What a server says of a key or a channel. Before it some name the user, which can be "shop-key".
_NO_ACCESS = re.compile(r"(?:access|publish to) .*\b(key|channel)s?\b")
_SIGNS = {"key": "~", "channel": "&"}
# Redis 6.2 has no such channels, and locks there need none.
_SHARDED = ("+spublish", "+ssubscribe")
_TRY = """
local said = {}
for i, command in ipairs(cjson.decode(ARGV[1])) do
  for j, word in ipairs(command) do
    command[j] = word == 'KEY' and KEYS[1] or word == 'CHANNEL' and ARGV[2] or word
  end
  local answer = redis.pcall(unpack(command))
  said[i] = type(answer) == 'table' and answer.err or ''
end
return said
"""


def commands_of(scripts: Mapping[str, Script]) -> list[str]:
    """The commands in the source of the scripts."""
    text = "".join(script.source for script in scripts.values())
    return sorted(set(re.findall(r"redis\.p?call\(\s*'([A-Z]+)'", text)))


class Examination(NamedTuple):
    """See `engine.inspection.Examination`."""

    transport: Transport
    own_keys: Keys
    scripts: Mapping[str, Script]

    def servers(self, trips: int) -> list[Server]:
        needed = self.transport.replicas.needed
        masters = self.transport.masters()
        found = [_server(links, trips, needed) for links, _ in masters]
        if len(masters) == 1:
            return found
        at = [address_of(links.make()) for links, _ in masters]
        return [server._replace(at=where) for server, where in zip(found, at, strict=True)]

    def refused(self) -> list[str]:
        every = [
            what
            for links, buckets in self.transport.masters()
            for what in self._refused_at(links, buckets[0])
        ]
        return list(dict.fromkeys(every))

    def memory(self, most: int) -> Memory | None:
        total, seen, namespaces = 0, 0, set[str]()
        counts: dict[str, int] = defaultdict(int)
        sizes: dict[str, list[int]] = defaultdict(list)
        for links, _ in self.transport.masters():
            size, may_scan = _allowed(links.answers(("DBSIZE",), ("SCAN", "0", "COUNT", "1")))
            if isinstance(size, Exception) or isinstance(may_scan, Exception):
                return None
            names = _some_keys(links, most)
            total, seen = total + size, seen + len(names)
            to_measure: dict[str, list[str]] = defaultdict(list)
            for name in names:
                found = _OURS.fullmatch(name)
                if found and found["namespace"] == self.own_keys.namespace:
                    kind = _kind(found["rest"])
                    counts[kind] += 1
                    if len(to_measure[kind]) < _MEASURED and name.isascii():
                        to_measure[kind].append(name)
                elif found and found["rest"] == "meta":
                    namespaces.add(found["namespace"])
            for kind, keys in to_measure.items():
                answers = links.answers(*[("MEMORY", "USAGE", key) for key in keys])
                sizes[kind] += [each for each in answers if isinstance(each, int)]
        kinds = tuple(Kind(name, n, fmean(sizes[name] or (0,))) for name, n in counts.items())
        return Memory(total, seen, kinds, tuple(sorted(namespaces)))

    def parked_tasks(self, most: int) -> list[ParkedTask]:
        found: list[ParkedTask] = []
        for links, buckets in self.transport.masters():
            looks = [("ZRANGE", self.own_keys.due(b), "0", str(most - 1)) for b in buckets]
            due = replies_of(links, *looks)
            for bucket, members in zip(buckets, due, strict=True):
                names = [member[2:] for member in members if member[:2] == b"l "]
                for name in names[: most - len(found)]:
                    found += self._parked_for(links, bucket, name)
        return found[:most]

    def owed(self, homes: set[str]) -> list[Owed]:
        found = []
        for links, buckets in self.transport.masters():
            for home in sorted(homes):
                keys = [f"{self.own_keys.prefix(bucket)}owed:{home}" for bucket in buckets]
                answers = replies_of(
                    links,
                    *[("ZCARD", key) for key in keys],
                    *[("ZRANGE", key, "0", "0", "WITHSCORES") for key in keys],
                    ("TIME",),
                )
                now = _seconds(answers.pop())
                counts, firsts = answers[: len(keys)], answers[len(keys) :]
                since = [now - float(first[1]) / 1e6 for first in firsts if first]
                if since:
                    found.append(Owed(home, sum(counts), max(since)))
        return found

    def _parked_for(self, links: Connections, bucket: int, raw: bytes) -> Iterator[ParkedTask]:
        prefix, name = self.own_keys.prefix(bucket), raw.decode(errors="surrogateescape")
        with suppress(UnicodeEncodeError):
            queue, places, messages = (f"{prefix}{kind}:{name}" for kind in "qwm")
            (ids,) = replies_of(links, ("ZRANGE", queue, "0", str(_PARKED_EACH - 1)))
            texts = replies_of(links, *[("HGET", messages, each.decode()) for each in ids])
            records = replies_of(links, *[("HGET", places, each.decode()) for each in ids])
            for text, record in zip(texts, records, strict=True):
                with suppress(ValueError, TypeError, AttributeError):  # not of ours, or gone
                    message, place = json.loads(text), json.loads(record)
                    headers = message.get("headers") or {}
                    yield ParkedTask(
                        name,
                        str(message.get("home", "")),
                        str(message.get("queue") or ""),
                        str(headers.get("task", "")),
                        str(headers.get("id", "")),
                        int(place.get("sent") or 0),
                    )

    def _refused_at(self, links: Connections, bucket: int) -> Iterator[str]:
        """The permissions that the user lacks at a server."""
        namespace, key = self.own_keys.namespace, f"{self.own_keys.prefix(bucket)}-"
        channel = self.own_keys.inbox("-", bucket)
        names = [name for name in commands_of(self.scripts) if name in _TRIED]
        commands = json.dumps([(name, *_TRIED[name]) for name in names])
        try_all = ("EVAL", _TRY, "1", key, commands, channel)
        tried: list[Command] = [
            try_all,
            ("EVALSHA", "0" * 40, "0"),
            ("PING",),
            ("INFO", "server"),
            ("CONFIG", "GET", "save"),
            ("SCAN", "0", "COUNT", "1"),
            ("HSCAN", key, "0"),
            ("DBSIZE",),
            ("MEMORY", "USAGE", key),
        ]
        if self.transport.replicas.needed:
            tried.append(("WAIT", "0", "1"))
        if self.transport.variant == "cluster":
            tried += [("CLUSTER", "SLOTS"), ("ASKING",)]
        rules = [_rule(command) for command in tried]
        said: list[tuple[str, Any]] = list(zip(rules, links.answers(*tried), strict=True))
        inner = said[0][1]
        if isinstance(inner, list):
            said += [
                (f"+{name.lower()}", ResponseError(text.decode()) if text else None)
                for name, text in zip(names, inner, strict=True)
            ]
        said.append(("+subscribe", _subscribed(links, "SUBSCRIBE", channel)))
        if self.transport.variant == "cluster":
            said.append(("+ssubscribe", _subscribed(links, "SSUBSCRIBE", channel)))
        for rule, answer in said:
            if isinstance(answer, Exception) and forbids(answer, is_old=rule not in _SHARDED):
                yield _what(rule, str(answer), namespace)


def _kind(rest: str) -> str:
    if rest.startswith("l:dedup\t"):
        return "dedup markers"
    return _KINDS.get(rest.partition(":")[0], "other")


def _some_keys(links: Connections, most: int) -> list[str]:
    names: list[str] = []
    for page in scanned(links, ("SCAN",), "COUNT", str(SCANNED)):
        names += [raw.decode(errors="surrogateescape") for raw in page]
        if len(names) >= most:
            break
    return names


def _server(links: Connections, count: int, needed: int) -> Server:
    asked: list[Command] = [("INFO", section) for section in _SECTIONS]
    *info, saves = _allowed(links.answers(*asked, ("CONFIG", "GET", "save")))
    fields: dict[str, str] = {}
    for part in info:
        fields |= fields_of(part)
    trips, clocks = [], []
    for _ in range(count):
        sent, began = time.time(), time.monotonic()
        (told,) = _allowed(links.answers(("TIME",)))
        took = time.monotonic() - began
        trips.append(took)
        if isinstance(told, list):
            clocks.append((took, _seconds(told) - sent - took / 2))
    took, clock = min(clocks, default=(0.0, 0.0))
    told = saves[1].decode() if isinstance(saves, list) and len(saves) == 2 else None
    return Server(fields, told, (clock, took / 2), tuple(sorted(trips)), needed)


def _allowed(answers: Sequence[Any]) -> Sequence[Any]:
    """The answers. Raises an error among them, unless it is about a permission."""
    return [
        each if isinstance(each, Exception) and forbids(each) else reply_of(each)
        for each in answers
    ]


def _subscribed(links: Connections, command: str, channel: str) -> Exception | None:
    link = links.make(1.0)
    try:
        link.connect()
        link.send_command(command, channel, check_health=False)
        link.read_response(disable_decoding=True)
    except FAULTS as error:
        return error
    finally:
        link.disconnect()
    return None


def _rule(command: Command) -> str:
    first, *rest = (word.lower() for word in command[:2])
    return f"+{first}|{rest[0]}" if first in ("cluster", "config", "memory") else f"+{first}"


def _what(rule: str, said: str, namespace: str) -> str:
    """The missing permission: for the command, or for its key or channel."""
    found = _NO_ACCESS.search(said)
    return f"{_SIGNS[found[1]]}{namespace}:*" if found else rule


def _seconds(told: Sequence[bytes]) -> float:
    return int(told[0]) + int(told[1]) / 1e6
