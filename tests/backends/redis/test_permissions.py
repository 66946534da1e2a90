"""The least permissions of docs/redis.md: with them every verb works, with one less it is told."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from urllib.parse import quote

import pytest

from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.backends.redis.scripts import scripts
from celery_relock.engine.engine import Engine
from celery_relock.engine.platform import clock
from celery_relock.engine.protocol import Queued, Renewal
from celery_relock.errors import LockConfigError
from tests.support import RedisServer, wait_for
from tests.support.backends import backend_of, close
from tests.support.permissions import PASSWORD, claim, everything, least
from tests.support.runs import Runs

COMMANDS = [rule for rule in least() if rule.startswith("+")]
# What the library goes on without, slower, after a warning.
SLOWER = ("+publish", "+subscribe", "&relock:*")


@pytest.fixture
def store_with(server: RedisServer) -> Iterator[Callable[..., RedisBackend]]:
    """A store of a user with these rules, on a database other than 0."""
    server.client().flushall()
    server.client().script_flush()
    server.client().acl_log_reset()
    stores: list[RedisBackend] = []

    def make(rules: list[str], namespace: str = "relock") -> RedisBackend:
        server.client().execute_command("ACL", "SETUSER", "us@r", "reset")
        server.client().execute_command("ACL", "SETUSER", "us@r", "on", f">{PASSWORD}", *rules)
        login = f"{quote('us@r', safe='')}:{quote(PASSWORD, safe='')}"
        url = f"redis://{login}@127.0.0.1:{server.port}/1"
        stores.append(backend_of(url, namespace))
        return stores[-1]

    yield make
    for backend in stores:
        close(backend.transport)


def refused(server: RedisServer) -> list[str]:
    """What the server did not let a user do."""
    objects = [str(entry["object"]) for entry in server.client().acl_log()]
    # redis-py tells its version, the store asks for the server's; both go on where they may not.
    return [each for each in objects if each not in ("client|setinfo", "client", "info")]


def test_the_page_lists_the_commands_that_the_scripts_use_and_those_of_a_connection() -> None:
    text = "".join(script.source for script in scripts().values())
    used = {f"+{name.lower()}" for name in re.findall(r"redis\.p?call\('([A-Z]+)'", text)}

    sent = {"+eval", "+evalsha", "+subscribe", "+ping", "+select", "+client|setname"}
    assert set(COMMANDS) == used | sent
    assert len(COMMANDS) == len(set(COMMANDS))


def test_the_least_is_enough_for_every_verb(
    server: RedisServer, store_with: Callable[..., RedisBackend]
) -> None:
    backend = store_with(least())
    everything(backend)

    assert refused(server) == []
    assert backend.examination().servers(0)


@pytest.mark.parametrize(
    "missing", [*sorted({*COMMANDS, "~relock:*"} - {*SLOWER, "+ping", "+pubsub"})]
)
def test_one_permission_less_is_told(store_with: Callable[..., RedisBackend], missing: str) -> None:
    backend = store_with([rule for rule in least() if rule != missing])
    with pytest.raises(LockConfigError, match=r"ACL SETUSER"):
        everything(backend)


def test_a_renewal_that_the_user_may_not_do_is_told_and_is_no_loss(
    store_with: Callable[..., RedisBackend],
) -> None:
    backend = store_with([rule for rule in least() if rule != "+pttl"])
    held = claim("r")
    backend.acquire(held)

    with pytest.raises(LockConfigError, match=r"lacks permissions that locks need"):
        backend.renew([Renewal(held.names[0], held.execution_id, held.attempt_id, held.lease)])


def test_a_heartbeat_that_the_user_may_not_do_is_told_and_costs_no_place(
    server: RedisServer, store_with: Callable[..., RedisBackend], caplog: pytest.LogCaptureFixture
) -> None:
    backend = store_with(least())
    held, waits = claim("r"), claim("s")
    backend.acquire(held)
    assert isinstance(backend.acquire(waits, 6.0), Queued)
    beat = Renewal(waits.names[0], waits.execution_id, waits.attempt_id, waits.lease, 6.0)

    server.client().execute_command("ACL", "SETUSER", "us@r", "-zrank")
    assert isinstance(backend.heartbeat([beat])[0], Queued)

    wait_for(lambda: "lacks permissions that locks need" in caplog.text, what="the warning")


def test_what_only_a_look_at_all_locks_needs_is_named_to_a_user_with_the_least(
    store_with: Callable[..., RedisBackend],
) -> None:
    asks = store_with(least()).inspection()
    for look, missing in ((asks.keys("*"), "scan"), (asks.messages(), "hscan")):
        with pytest.raises(LockConfigError, match=rf"lacks \+{missing}, which locks do not need"):
            list(look)


def test_another_namespace_is_out_of_reach(store_with: Callable[..., RedisBackend]) -> None:
    backend = store_with(least(), "other")

    with pytest.raises(LockConfigError, match=r"lacks permissions that locks need"):
        backend.acquire(claim("r"))


@pytest.mark.parametrize("missing", SLOWER)
def test_without_messages_a_waiter_acquires_by_its_heartbeat_and_a_warning_says_so(
    store_with: Callable[..., RedisBackend], missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "celery_relock")
    runs = Runs(Engine(store_with([rule for rule in least() if rule != missing])))
    holder, waiter = runs.held("a"), runs.lease("a", lease=1.2)
    thread = runs.waiting(waiter)
    runs.release(holder)

    assert runs.release(thread.entered())
    told = [record.getMessage() for record in caplog.records if "late" in record.getMessage()]
    assert told
    assert "ACL SETUSER" in told[0]


def test_a_waiter_and_a_renewal_need_no_more_than_the_least(
    server: RedisServer, store_with: Callable[..., RedisBackend]
) -> None:
    runs = Runs(Engine(store_with(least())))
    holder, waiter = runs.held("a", lease=3.0), runs.lease("a", lease=3.0)
    thread = runs.waiting(waiter)
    now = clock()
    wait_for(lambda: min(holder.renewed, waiter.renewed) > now, what="a renewal of both")
    assert not holder.lost
    assert runs.release(holder)

    assert runs.release(thread.entered())
    assert refused(server) == []
