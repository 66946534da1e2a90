"""The backend calls every verb as the verb's header says, and the replies are those of the header.

The calls are recorded on their way through the backend's connections, while each verb is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest

from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.backends.redis.connections import SingleServer
from celery_relock.backends.redis.keys import SCHEMA
from celery_relock.engine.protocol import (
    LINE,
    Claim,
    Debounce,
    ParkRequest,
    PlaceRequest,
    Release,
    Renewal,
    Successor,
)
from tests.support.backends import backend_of, close
from tests.support.lua_headers import Header as Script
from tests.support.lua_headers import Parameter
from tests.support.lua_headers import headers as scripts
from tests.support.worker import ROOT

VERBS = sorted(path.stem for path in (ROOT / "lua").glob("*.lua"))


@dataclass
class Sent:
    """One script call as the backend sent it, and the server's reply."""

    verb: str
    keys: list[str]
    args: list[Any]
    reply: Any


@pytest.fixture
def backend(redis_url: str, namespace: str) -> Iterator[RedisBackend]:
    opened = backend_of(redis_url, namespace)
    yield opened
    close(opened.transport)


@pytest.fixture
def sent(monkeypatch, backend: RedisBackend) -> list[Sent]:
    """Fills with every script call of the backend, on its way through its connections. Threads of
    tests before this one can still make up for calls to servers that are gone."""
    calls: list[Sent] = []
    run_each = SingleServer.run_each

    def many(self, script, batch, *rest, **options):
        replies = run_each(self, script, batch, *rest, **options)
        for (keys, args), reply in zip(batch, replies, strict=True):
            if self is backend.transport and script.name != "open":
                calls.append(Sent(script.name, list(keys), list(args), _array(reply)))
        return replies

    monkeypatch.setattr(SingleServer, "run_each", many)
    return calls


def _claim(run: str, *names: str, attempt_id: str = "n1") -> Claim:
    return Claim(run, attempt_id, f"owner-{run}", names, (1,) * len(names), 30.0, f"who-{run}")


def _use_every_verb(backend: RedisBackend) -> None:
    """Each verb, with one lock and with several, and each of its replies."""
    backend.acquire(_claim("r1", "a"))  # HELD
    backend.acquire(_claim("r2", "a"))  # BUSY
    backend.acquire(_claim("r2", "a"), waiter_lease=20.0, inbox="inbox")  # WAIT
    backend.acquire(_claim("r1", "a", attempt_id="n2"))  # ATTEMPT
    backend.acquire(_claim("r3", "b", "c"))
    backend.renew([Renewal("a", "r1", "n1", 30.0), Renewal("b", "r3", "gone", 30.0)])
    renewals = [("a", "r1"), ("a", "r2"), ("b", "nobody")]  # HELD, WAIT, LOST
    backend.heartbeat([Renewal(name, run, "n1", 30.0, 20.0) for name, run in renewals])
    backend.inspect("a")
    backend.release(Release(("b", "c"), "r3", "n1", ended="execution", remember=9.0))  # RELEASED
    backend.release(Release(("b", "c"), "r3", "n1"))  # GONE
    backend.acquire(_claim("r3", "b", "c"))  # ENDED
    backend.force_release("a")
    backend.acquire(_claim("r12", "a")._replace(ancestors=("r1",)))
    backend.release(Release(("a",), "r12", "n1", successor=Successor("r13", 9.0)))
    backend.force_release("a")
    park_request = ParkRequest("text", "home", "task", most=1)
    backend.acquire(_claim("r4", "p"))
    backend.park(_claim("r5", "p"), park_request)  # PARKED
    backend.park(_claim("r6", "p"), park_request)  # FULL
    call = Debounce("c1", None, False, 5.0, 60.0, "task-1", "who")
    backend.burst("d", True)  # NONE
    backend.debounce("d", call, park_request)  # PARKED
    backend.debounce("d", call._replace(call_id="c2"), park_request)  # BURST
    backend.debounce("e", call._replace(call_id="c3"), park_request._replace(most_in_all=1))  # FULL
    backend.inspection().parked("task")
    backend.inspection().survey(backend.inspection().keys_of("p"), 9, 9)
    backend.resume("home", "by", ["task"])
    backend.withdraw("r5", 9.0)  # WITHDRAWN
    backend.withdraw("r5", 9.0)  # ENDED
    backend.withdraw("none", 9.0)  # GONE
    backend.arrived(["r5"], 5.0)
    backend.announce(["home:queue"], "worker", 6.0)
    backend.consumed("home:queue")
    backend.acquire(_claim("r7", "x"))
    backend.acquire(_claim("r8", "y"))
    backend.acquire(_claim("inner-r7", "y")._replace(stuck=("r7",)), waiter_lease=20.0)
    backend.acquire(_claim("inner-r8", "x")._replace(stuck=("r8",)), waiter_lease=20.0)  # DEADLOCK
    place = PlaceRequest(f"{LINE}x", "r9", "task", "who", 60.0, 0.0, 0.0, 99.0)
    backend.place(place)  # PLACED
    backend.place(place._replace(execution_id="r3"))  # ENDED
    marked = place._replace(execution_id="r10", marker=_claim("mark", "dedup", attempt_id="-"))
    backend.place(marked)
    mine = _claim("my mark", "dedup", attempt_id="-")
    backend.place(marked._replace(execution_id="r11", marker=mine))  # BUSY
    backend.downgrade(("x",), "r7", "n1")  # SHARED
    backend.downgrade(("y",), "r7", "n1")  # LOST
    backend.acquire(_claim("inner-r8", "y")._replace(owner="owner-r8", ancestors=("r8",)))
    backend.downgrade(("y",), "r8", "n1")  # JOINED


def _arguments(script: Script, call: Sent) -> Iterator[tuple[tuple[Parameter, ...], list[str]]]:
    """Each argument with its lines in the header. Of one that is words, a line for each word."""
    for index, lines in groupby(script.arguments, lambda one: one.index):
        parameters = tuple(lines)
        values = call.args[index - 1 :] if parameters[0].repeats else call.args[index - 1 : index]
        if parameters[0].word and values:
            values = values[0].split()
        if not values and parameters[0].is_optional:
            continue
        is_shorter = parameters[-1].is_optional and len(values) < len(parameters)
        yield parameters[:-1] if is_shorter else parameters, values


def _groups(parameters: tuple[Parameter, ...], count: int) -> float:
    """How often the last line of a header repeats for so many values; 0 where it does not."""
    if not (parameters and parameters[-1].repeats):
        return 0 if count == len(parameters) else -1
    return (count - len(parameters) + 1) / len(parameters[-1].label.split(", "))


def test_the_backend_calls_every_verb_with_the_keys_and_arguments_of_its_header(backend, sent):
    _use_every_verb(backend)

    assert {call.verb for call in sent} == {*VERBS} - {"open"}  # which the next test has
    for call in sent:
        script = scripts()[call.verb]
        locks = _groups(script.keys, len(call.keys))
        assert locks >= 0, call
        for one, key in zip(script.keys, call.keys, strict=False):
            assert _kind_of(key) == one.label, call
        for parameters, values in _arguments(script, call):
            last, groups = parameters[-1], _groups(parameters, len(values))
            is_free = last.repeats and parameters[0].is_optional
            assert groups >= 1 if is_free else groups == last.repeats * locks, call
            for one, value in zip(parameters, values, strict=False):
                kinds = one.text.split(":")[0].split(", ")
                words = value.split(" ") if " " in one.label else [value]
                for kind, word in zip(kinds, words, strict=False):
                    is_number = kind.startswith(("ms", "count", "number", "1 or 0"))
                    assert word.isdigit() == is_number, (call, one)


def _kind_of(key: str) -> str:
    short = key.split(":", 2)[2].partition(":")[0]
    kinds = {"l": "lock", "q": "queue", "w": "waiters", "d": "tombstone", "m": "messages"}
    return kinds.get(short, short)


def test_every_reply_that_a_header_announces_is_given_and_no_other(backend, sent):
    _use_every_verb(backend)

    seen: dict[str, set[str]] = {}
    for call in sent:
        rows = [call.reply] if _is_tagged(call.reply) else map(_array, call.reply)
        tags = {row[0].decode() for row in rows if _is_tagged(row)}
        seen.setdefault(call.verb, set()).update(tags)
    assert seen == {verb: scripts()[verb].tags for verb in VERBS if verb != "open"}


def _array(row: Any) -> Any:
    return row.split() if isinstance(row, bytes) else row


def _is_tagged(row: Any) -> bool:
    return isinstance(row, list) and row != [] and bool(re.fullmatch(rb"[A-Z]+", _text(row[0])))


def _text(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b""


def test_every_key_that_the_verbs_leave_or_touch_is_of_the_type_in_its_header(
    backend, sent, client, namespace
):
    _use_every_verb(backend)
    backend.acquire(_claim("r1", "a"))
    backend.acquire(_claim("r2", "a"), waiter_lease=20.0)
    backend.inspect("a")
    for name in ("p", f"{LINE}x"):
        backend.park(_claim("r7", name), ParkRequest("text", "home", "task"))

    types = {
        _kind_of(key): client.type(key).decode().replace("zset", "sorted set")
        for call in sent
        for key in call.keys
        if client.exists(key)
    }
    assert set(types) == {
        *("meta", "lock", "tombstone", "due", "live", "parked", "sent"),
    }
    for script in scripts().values():
        for one in script.keys:
            assert one.text.startswith(types[one.label]), (script.name, one)


def test_open_takes_the_layout_and_answers_ok_or_which_other_there_is(client, namespace):
    script, meta = scripts()["open"], f"{namespace}:{{0}}:meta"

    assert [one.label for one in script.arguments] == ["schema", "buckets", "kind"]
    assert client.eval(script.source, 1, meta, SCHEMA, 1) == [b"OK"]
    assert client.eval(script.source, 1, meta, SCHEMA, 64) == [b"OTHER", b"%d" % SCHEMA, b"1"]
