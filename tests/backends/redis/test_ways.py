"""Every way to a Redis carries all that locks do: takes, waits, renewals, messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
import redis
from celery import Celery

from celery_relock import LockedTask
from celery_relock.engine import lease as lease_module
from celery_relock.engine.protocol import Conflict, Held
from celery_relock.engine.renewal import keepalive
from celery_relock.engines import engine_for
from celery_relock.errors import LockConfigError, LockUnavailable
from celery_relock.lock import Lock
from tests.support import RedisServer, wait_for
from tests.support.ports import free_port
from tests.support.runs import Runs
from tests.support.tls import Authority, speaks_tls

OLD, NEW = "p@ss/w:o#r?d%&; +", "n:e@w"

Start = Callable[..., RedisServer]


class Rotating(redis.CredentialProvider):
    """The password of the day."""

    def __init__(self) -> None:
        self.password, self.asked = OLD, 0

    def get_credentials(self) -> tuple[str, str]:
        self.asked += 1
        return "us@r", self.password


@pytest.fixture(params=["tcp", "unix", "tls", "client", "function"])
def way(request: pytest.FixtureRequest, own_redis: Start, tmp_path: Path) -> Any:
    """A server, and a way to it as `relock_url` has it."""
    port, config, secret = free_port(), (), {"password": OLD}
    path = str(tmp_path / "redis.sock")
    login = f":{quote(OLD, safe='')}@"
    places: dict[str, Callable[[RedisServer], Any]] = {
        "tcp": lambda server: f"{server.url}?health_check_interval=1",
        "unix": lambda _: f"unix://{login}{path}",
        "client": lambda server: server.client(client_name="celery-relock", socket_timeout=None),
        "function": lambda server: lambda: server.client(client_name="celery-relock", protocol=3),
    }
    if request.param == "unix":
        config = ("--unixsocket", path)
    if request.param == "tls":
        config, places["tls"] = _tls(own_redis, tmp_path, port, login)
    server = own_redis(*config, **secret)
    return SimpleNamespace(server=server, place=places[request.param](server))


def _tls(own_redis: Start, folder: Path, port: int, login: str) -> Any:
    if not speaks_tls(own_redis().binary):
        pytest.skip("this Redis was built without TLS")
    try:
        authority = Authority(folder)
    except FileNotFoundError:
        pytest.skip("no openssl command")
    certificate, key = authority.certificate("worker")
    files = f"ssl_ca_certs={authority.ca}&ssl_certfile={certificate}&ssl_keyfile={key}"
    url = f"rediss://{login}localhost:{port}/0?{files}"
    return authority.server_config(port=port), lambda _: url


def test_a_waiter_hears_of_its_turn_and_a_hold_is_renewed(
    way: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "WAITER_LEASE", 60.0)
    runs = Runs(engine_for(way.place, namespace))
    runs.ready()
    holder, waiter = runs.held("a", lease=60.0), runs.lease("a", lease=60.0)
    thread = runs.waiting(waiter)
    now = time.monotonic()
    keepalive.look_now(runs.engine.backend)
    wait_for(lambda: min(holder.renewed, waiter.renewed) > now, what="a renewal")
    assert not holder.lost
    started = time.monotonic()
    assert runs.release(holder)
    thread.entered()
    assert time.monotonic() - started < 10  # and not at the next heartbeat, after 20 s
    assert runs.release(waiter)


def test_each_connection_has_a_name(way: Any, namespace: str) -> None:
    runs = Runs(engine_for(way.place, namespace))
    holder, waiter = runs.held("a", lease=3.0), runs.lease("a", lease=3.0)
    thread = threading.Thread(target=lambda: runs.engine.acquire(waiter, 30.0))
    thread.start()
    admin = way.server.client()
    admin.client_setname("admin")

    def names() -> list[str]:
        return sorted(client["name"] for client in admin.client_list())

    # Work, renewals and inbox; a connection is nameless until it has logged in.
    wait_for(lambda: names()[:4] == ["admin", *["celery-relock"] * 3], what="named connections")
    runs.release(holder)
    thread.join(30)
    runs.release(waiter)


def test_a_password_that_changes_is_asked_for_at_each_connection(
    own_redis: Start, namespace: str
) -> None:
    server, provider = own_redis(), Rotating()
    admin = server.client()
    admin.execute_command("ACL", "SETUSER", "us@r", "on", f">{OLD}", "~*", "&*", "+@all")
    place = lambda: redis.Redis(port=server.port, credential_provider=provider)  # noqa: E731
    runs = Runs(engine_for(place, namespace))
    lease = runs.held("a", lease=3.0)
    admin.execute_command("ACL", "SETUSER", "us@r", "resetpass", f">{NEW}")
    provider.password, before = NEW, provider.asked
    admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    killed = time.monotonic()
    wait_for(lambda: lease.renewed > killed, what="a renewal")
    assert not lease.lost
    assert provider.asked > before
    assert isinstance(runs.engine.acquire(runs.lease("b"), 0.0), Held)
    assert runs.release(lease)


def test_while_a_provider_of_credentials_fails_redis_cannot_be_reached(
    own_redis: Start, namespace: str
) -> None:
    class Sealed(Exception):
        """An error of the provider's own, as vault clients have."""

    def fails() -> tuple[str, str]:
        raise Sealed("the vault is sealed")

    server, provider = own_redis(), Rotating()
    provider.get_credentials = lambda: ("default", "")
    client = redis.Redis(port=server.port, credential_provider=provider)
    app = Celery(broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(relock_url=lambda: client, relock_namespace=namespace)

    @app.task(base=LockedTask, lock_key="a", shared=False)
    def task() -> str:
        provider.get_credentials = fails
        server.client().client_kill_filter(_type="normal")
        return "done"

    assert task.apply().get() == "done", "its lock could not be released"
    with pytest.raises(LockUnavailable, match="the vault is sealed"):
        task.apply().get()


def test_a_function_is_called_once_for_all_locks_of_a_process(
    redis_url: str, namespace: str
) -> None:
    made = []

    def locks() -> redis.Redis:
        made.append(redis.Redis.from_url(redis_url))
        return made[-1]

    for name in ("a", "b", "a"):
        with Lock(locks, name, namespace=namespace):
            pass

    assert len(made) == 1
    assert not made[0].connection_pool._available_connections, "the client itself is not used"
    assert engine_for(locks, namespace) is engine_for(made[0], namespace)


class Vault:
    """Has no hash, and methods."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, url: str):
        self.url = url

    def __call__(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def locks(self) -> redis.Redis:
        return self()


def test_anything_that_can_be_called_is_such_a_function(redis_url: str, namespace: str) -> None:
    vault = Vault(redis_url)

    assert engine_for(vault, namespace) is engine_for(vault.locks, namespace)
    assert engine_for(vault, namespace) is engine_for(lambda: vault(), namespace)


def test_while_such_a_function_cannot_connect_redis_cannot_be_reached(
    redis_url: str, namespace: str
) -> None:
    calls: list[bool] = []

    def locks() -> redis.Redis:
        calls.append(up)
        if up:
            return redis.Redis.from_url(redis_url)
        raise redis.ConnectionError("no node answers")

    up = False
    runs, other = Runs(engine_for(locks, namespace)), engine_for(redis_url, namespace)
    backend = runs.engine.backend
    for _ in range(3):
        with pytest.raises(LockUnavailable, match=r"locks\(\) failed .*no node answers"):
            runs.engine.acquire(runs.lease("a"), 0.0)
    assert len(calls) == 2, "not again within a second"
    assert not backend.id
    assert backend == runs.engine.backend != other.backend

    up = True
    wait_for(lambda: backend.id, what="the way")
    lease = runs.held("a")

    assert engine_for(locks, namespace) is runs.engine
    assert backend == other.backend
    assert isinstance(other.acquire(Runs(other).lease("a"), 0.0), Conflict)
    runs.release(lease)


def test_what_was_never_sent_is_not_released_later(namespace: str) -> None:
    def locks() -> redis.Redis:
        raise redis.ConnectionError("no node answers")

    lock = Lock(locks, "a", namespace=namespace)
    with pytest.raises(LockUnavailable):
        lock.acquire()
    assert not engine_for(locks, namespace).later._calls


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: 1 / 0, r"<lambda>\(\) failed to make a Redis client: ZeroDivisionError"),
        (lambda: "redis://h", "not builtins.str"),
        (lambda: None, "not builtins.NoneType"),
    ],
)
def test_a_function_that_makes_no_client_is_told(make: Any, says: str, namespace: str) -> None:
    with pytest.raises(LockConfigError, match=says):
        engine_for(make, namespace)
