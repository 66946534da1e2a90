"""Inspection of the locks in Redis by people, see `engine.inspection`. Loaded when needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...engine import ids
from ...engine.events import told_by
from ...engine.inspection import LockInfo, ParkedMessage, Waiter, holder_of
from ...engine.protocol import KEPT, LINE, SHARED, HoldInfo
from .connections import Command, Connections, Effort, Transport
from .errors import reply_of
from .keys import SCHEMA, Keys, bucket_of, in_parts
from .replies import as_text, hold_info, taken_holds
from .scripts import Script

# Keys for one SCAN to pass over, and locks for one script to read: each keeps a server busy for
# about a millisecond.
SCANNED, _SURVEYED = 1000, 50
_SPECIAL = re.compile(r"[*?\[\]\\^-]")


class Inspection(NamedTuple):
    """See `engine.inspection.Inspection`."""

    transport: Transport
    own_keys: Keys
    scripts: Mapping[str, Script]

    def has_layout(self) -> bool:
        # Not by `open`, which would create a namespace that somebody has misspelt.
        meta = self.own_keys.meta()
        (found,) = replies_of(self.transport.at(meta), ("HMGET", meta, "schema", "buckets"))
        if found == [None, None]:
            return False
        layout = [as_text(each or b"0") for each in found]
        if layout != [str(SCHEMA), str(self.own_keys.buckets)]:
            raise self.own_keys.other_layout(*layout)
        return True

    def keys(self, pattern: str) -> Iterator[list[str]]:
        named = self.own_keys.lock(pattern)
        if not named.endswith(pattern):  # a name that long is shortened there, so none is like it
            yield [named]
        start = _SPECIAL.sub(r"\\\g<0>", self.own_keys.namespace)
        bucket = "0" if self.own_keys.buckets == 1 else "*"
        match = f"{start}:{{{bucket}}}:[lq]:{pattern}"
        keys: list[str] = []
        metas = list(map(self.own_keys.meta, self.own_keys.every_bucket))
        for server, _ in self.transport.masters(metas):
            for found in scanned(server, ("SCAN",), "MATCH", match, "COUNT", str(SCANNED)):
                keys += [key for raw in found if (key := self._lock_key(raw))]
                if len(keys) >= _SURVEYED:
                    yield keys
                    keys = []
        if keys:
            yield keys

    def keys_of(self, name: str) -> list[str]:
        keys = [self.own_keys.lock(name)]
        if self.own_keys.is_shortened(name):
            keys += [
                f"{self.own_keys.prefix(bucket)}l:{name}" for bucket in self.own_keys.every_bucket
            ]
        return keys

    def survey(self, keys: Sequence[str], holders: int, waiters: int) -> list[LockInfo]:
        foreign = (key for key in keys if not _is_text(key))
        found = {key: LockInfo(self._name(key), 0.0, foreign=True) for key in foreign}
        parts = in_parts((key for key in keys if key not in found), bucket_of, _SURVEYED)
        replies = self._run("survey", parts, [str(holders), str(waiters), ""])
        for part, reply in zip(parts, replies, strict=True):
            at, rows = reply[0] / 1000, reply[1 : 1 + len(part)]
            for key, row in zip(part, rows, strict=True):
                found[key] = _lock(self._name(key), at, row)
        return [found[key] for key in keys]

    def parked(self, task: str) -> ParkedMessage | None:
        calls = [
            [self.own_keys.parked(bucket), self.own_keys.sent(task, bucket)]
            for bucket in self.own_keys.every_bucket
        ]
        for at, *rest in self._run("where", calls, [task]):
            if rest:
                execution_id, name, position, ticket, place, text = rest
                waiter = _waiter(at / 1000, as_text(name), execution_id, position, ticket, place)
                return ParkedMessage(as_text(name), at / 1000, waiter, as_text(text))
        return None

    def needed(self, execution_id: str) -> dict[str, str]:
        found: list[str] = []
        for server, buckets in self.transport.masters():
            keys = [f"{self.own_keys.prefix(bucket)}s:{execution_id}" for bucket in buckets]
            for notes in replies_of(server, *[("HGETALL", key) for key in keys]):
                found += map(as_text, notes)
        return dict(zip(found[::2], found[1::2], strict=True))

    def messages(self) -> Iterator[list[str]]:
        for bucket in self.own_keys.every_bucket:
            key = self.own_keys.parked(bucket)
            server = self.transport.at(key)
            for fields in scanned(server, ("HSCAN", key), "COUNT", str(_SURVEYED)):
                commands = [
                    ("HGET", self.own_keys.message(as_text(name), bucket), as_text(execution_id))
                    for execution_id, name in zip(fields[::2], fields[1::2], strict=True)
                    if not execution_id.startswith(b"#")
                ]
                yield [as_text(text) for text in replies_of(server, *commands) if text]

    def force_release(self, key: str, execution_id: str = "") -> tuple[HoldInfo, ...]:
        meta = self.own_keys.meta(bucket_of(key))
        taken, *_ = self.transport.run(self.scripts["force_release"], [meta, key], [execution_id])
        return taken_holds(taken)

    def _lock_key(self, raw: bytes) -> str:
        """The key of the lock that a key belongs to, "" if it is none of ours."""
        key = raw.decode(errors="surrogateescape")
        start, _, rest = key.partition("}:")
        number = start.removeprefix(f"{self.own_keys.namespace}:{{")
        is_ours = number.isdigit() and int(number) < self.own_keys.buckets
        return f"{start}}}:l:{rest[2:]}" if is_ours else ""

    def _name(self, key: str) -> str:
        name = key.partition("}:l:")[2]
        return name.encode(errors="surrogateescape").decode(errors="backslashreplace")

    def _run(self, verb: str, calls: Sequence[Sequence[str]], args: Sequence[str]) -> list[Any]:
        script = self.scripts[verb]
        if len(calls) == 1:
            return [self.transport.run(script, calls[0], args)[0]]
        outcomes = self.transport.run_each(script, [(keys, args) for keys in calls], Effort())
        return list(map(reply_of, outcomes))


def replies_of(server: Connections, *commands: Command) -> list[Any]:
    """The answers. Raises an error among them."""
    return list(map(reply_of, server.answers(*commands)))


def scanned(server: Connections, scan: Command, *how: str) -> Iterator[list[bytes]]:
    """What SCAN or HSCAN finds, some at a time."""
    cursor = "0"
    while True:
        ((following, found),) = replies_of(server, (*scan, cursor, *how))
        yield found
        cursor = following.decode()
        if cursor == "0":
            return


def _lock(name: str, at: float, row: Sequence[Any]) -> LockInfo:
    if len(row) == 1:
        return LockInfo(name, at, foreign=True)
    held, waiting, parked, holds, places = row
    holders = tuple(holder_of(hold_info(*each), name) for each in holds)
    waiters = tuple(_waiter(at, name, *each) for each in places)
    return LockInfo(name, at, held, waiting, parked, holders, waiters)


def _waiter(
    at: float, name: str, execution_id: bytes, position: int, ticket: bytes, record: bytes
) -> Waiter:
    place = json.loads(record)
    names = place.get("names") or [name]
    state = "waiting"
    if place.get("line") and (place.get("attempt") == KEPT or place.get("arrived")):
        state = "awaited"
    elif place.get("parked"):
        has_turn = float(place.get("back") or 0) / 1000 > at
        state = ("owed" if place.get("untold") else "resumed") if has_turn else "parked"
    task, task_id, host, pid = told_by(str(place.get("label", "")))
    since = due = float(ticket) / 1e6
    if name.startswith(LINE):
        began = place.get("turn" if state == "awaited" else "came")
        since = at if began is None else float(began) / 1000
    return Waiter(
        position,
        state,
        ids.full(str(place.get("owner", ""))),
        as_text(execution_id),
        task,
        task_id or ids.full(str(place.get("task", ""))),
        host,
        pid,
        since,
        tuple(names),
        dict(zip(names, place.get("limits", ()), strict=False)).get(name) == SHARED,
        int(place.get("sent") or 0),
        due,
    )


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
