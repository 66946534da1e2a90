"""docs/redis.md and docs/redis-failures.md are so: each example connects as it says, each failure
is told as the table says."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_relock import LockedTask, errors
from celery_relock.declaration import engine_of
from celery_relock.settings import backend_settings
from tests.docs.pages import blocks, text
from tests.support import RedisServer, wait_for
from tests.support.backends import close
from tests.support.cluster import ClusterServers
from tests.support.permissions import PASSWORD, least
from tests.support.ports import free_port
from tests.support.sentinel import Watcher
from tests.support.tls import Authority, speaks_tls

PAGE = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
EXAMPLES = {
    heading: block
    for heading, text in SECTIONS.items()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
}
FAILURES = {
    cells[0]: cells[1:]
    for line in text("redis-failures").splitlines()
    if line.startswith("| ") and (cells := [cell.strip() for cell in line.strip("|").split("|")])
}


@pytest.fixture(scope="module")
def place(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Redis that is reached in all the ways of the page."""
    folder, tls = tmp_path_factory.mktemp("place"), free_port()
    config: tuple[str, ...] = ("--unixsocket", str(folder / "redis.sock"))
    files, config = {}, (*config, "--repl-diskless-sync-delay", "0")
    if speaks_tls(redis_binary):
        authority = Authority(folder)
        config += authority.server_config(port=tls)
        certificate, key = authority.certificate("worker")
        files = {"/etc/shop/ca.pem": authority.ca, "/etc/shop/worker.pem": certificate}
        files["/etc/shop/worker.key"] = key
    server = RedisServer(*config, binary=redis_binary)
    server.client().execute_command("ACL", "SETUSER", "relock", "on", f">{PASSWORD}", *least())
    replica = RedisServer(binary=redis_binary)
    replica.client().replicaof("127.0.0.1", server.port)
    wait_for(lambda: server.client().wait(1, 100) == 1, what="the replica")
    watch = f'sentinel monitor shop 127.0.0.1 {server.port} 1\nrequirepass "{PASSWORD}"'
    sentinel = Watcher(redis_binary, watch)
    names = {"/run/redis/redis.sock": str(folder / "redis.sock"), **files}
    names |= {f"sentinel{i}.internal:26379": f"127.0.0.1:{sentinel.port}" for i in (1, 2, 3)}
    cluster = ClusterServers(redis_binary, replicas=False)
    for number, node in enumerate(cluster.nodes, 1):
        names[f"node{number}.internal:6379"] = f"127.0.0.1:{node.port}"
    found = {"server": server, "cluster": cluster, "tls": tls, "names": names}
    yield SimpleNamespace(**found, has_tls=bool(files))
    for each in (cluster, sentinel, replica, server):
        each.stop()


def configured(code: str, place: Any) -> Celery:
    """The app of an example, where its addresses and files are those of this place."""
    port = place.tls if "rediss:" in code else place.server.port
    host = "localhost" if "rediss:" in code else "127.0.0.1"
    code = code.replace("locks.internal:6379", f"{host}:{port}")
    code = code.replace('host="locks.internal", port=6379', f'host="{host}", port={port}')
    for written, real in place.names.items():
        code = code.replace(written, real)
    app = Celery("shop", set_as_current=False, task_always_eager=True)
    exec(compile(code, "docs/redis.md", "exec"), {"app": app, "read_secret": lambda _: PASSWORD})
    return app


def task_of(app: Celery) -> Any:
    @app.task(base=LockedTask, bind=True, lock_key="account", name="shop.work", shared=False)
    def work(self: Any) -> set[tuple[str, str, str]]:
        clients = app.conf.inspected.client_list() if "inspected" in app.conf else []
        return {(client["name"], client["user"], client["db"]) for client in clients}

    return work


SEEN = {
    "TCP": ("shop", "default", "1"),
    "A unix socket": ("celery-relock", "default", "1"),
    "TLS": ("celery-relock", "default", "0"),
    "Sentinel": ("celery-relock", "default", "1"),
    "Redis Cluster": ("celery-relock", "default", "0"),
    "Replicas that must have a hold": ("celery-relock", "default", "0"),
    "A user and a password": ("celery-relock", "relock", "0"),
    "A password that changes": ("", "relock", "0"),
    "A Redis that is not the broker": ("celery-relock", "default", "0"),
    "RabbitMQ as the broker, and no result backend": ("celery-relock", "default", "0"),
}


def test_the_examples_are_these() -> None:
    assert EXAMPLES.keys() == SEEN.keys()
    assert len(blocks("redis")) == len(EXAMPLES)


@pytest.mark.parametrize("heading", EXAMPLES)
def test_an_example_connects_and_shows_itself_to_the_server_as_it_says(
    place: Any, heading: str
) -> None:
    if heading == "TLS" and not place.has_tls:
        pytest.skip("this Redis was built without TLS")
    app = configured(EXAMPLES[heading], place)
    app.conf.inspected = place.cluster if "Cluster" in heading else place.server.client()
    try:
        assert SEEN[heading] in task_of(app).delay().get()
        assert backend_settings(app).source == "relock_url"
    finally:
        close(engine_of(app).backend.transport)


def test_celerys_report_shows_the_password_of_relock_url_unless_that_is_a_function() -> None:
    app = Celery("shop", set_as_current=False, broker="redis://:broker-pw@localhost")
    for url, shown in (("redis://:lock-pw@localhost", ["lock"]), (lambda: None, [])):
        app.conf.update(relock_url=url, result_backend="redis://:result-pw@localhost")
        report = app.bugreport()
        assert "relock_url" in report
        assert [each for each in ("broker", "result", "lock") if f"{each}-pw" in report] == shown


def _wrong_password(place: Any) -> str:
    return f"redis://relock:wrong@127.0.0.1:{place.server.port}/0"


def _no_permission(place: Any) -> str:
    rules = [rule for rule in least() if rule != "+hset"]
    place.server.client().execute_command("ACL", "SETUSER", "few", "on", ">pw", *rules)
    return f"redis://few:pw@127.0.0.1:{place.server.port}/0"


WAYS = {
    "nobody listens at the address": lambda place: f"redis://127.0.0.1:{free_port()}/0",
    "there is no such socket": lambda _: "unix:///tmp/no/such.sock",
    "no node of a cluster answers": lambda _: f"redis+cluster://127.0.0.1:{free_port()}",
    "the password is wrong": _wrong_password,
    "a permission is missing": _no_permission,
    "there is no such database": lambda place: f"redis://127.0.0.1:{place.server.port}/99",
    "the certificate cannot be verified": lambda place: f"rediss://localhost:{place.tls}/0",
}


def failing(url: str) -> tuple[BaseException, float]:
    """What a task fails with, and after how many seconds."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(relock_url=url, result_backend=None)
    work = task_of(app)
    started = time.monotonic()
    result = work.apply()
    seconds = time.monotonic() - started
    assert result.state == "FAILURE"
    print(f"{url}: {type(result.result).__name__} after {seconds:.2f} s: {result.result}")
    return result.result, seconds


@pytest.mark.parametrize("what", WAYS)
def test_a_failure_is_told_as_the_table_says(place: Any, what: str) -> None:
    if "certificate" in what and not place.has_tls:
        pytest.skip("this Redis was built without TLS")
    error, seconds = failing(WAYS[what](place))

    assert_as_told(what, error, seconds)


def test_a_server_that_is_silent_is_told_as_the_table_says(own_redis: Any) -> None:
    server = own_redis()
    server.pause()
    error, seconds = failing(server.url)
    server.resume()

    assert_as_told("the server is silent", error, seconds)


def test_a_port_without_tls_looks_like_a_silent_server(redis_server: RedisServer) -> None:
    error, seconds = failing(f"rediss://127.0.0.1:{redis_server.port}/0?socket_timeout=0.5")

    assert type(error) is errors.LockUnavailable, error
    assert seconds < 5


def assert_as_told(what: str, error: BaseException, seconds: float) -> None:
    name, promised = FAILURES[what]
    assert type(error) is getattr(errors, name.strip("`")), error
    assert float(promised.removesuffix(" s")) - 0.2 < seconds < float(promised[:-2]) + 10


def test_a_restart_within_the_patience_is_not_seen(own_redis: Any) -> None:
    server = own_redis()
    app = Celery("shop", set_as_current=False)
    app.conf.update(relock_url=server.url, result_backend=None)
    work = task_of(app)
    assert work.apply().state == "SUCCESS"
    server.kill()
    timer = threading.Timer(0.5, lambda: server.restart(keep_data=False))
    timer.start()
    assert work.apply().state == "SUCCESS"
    timer.join()
