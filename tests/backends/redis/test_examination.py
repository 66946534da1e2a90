"""What a doctor finds out about a Redis, whatever its user may do there; nothing is changed."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from urllib.parse import quote

import pytest

from celery_relock.backends.redis.connections import Replicas
from celery_relock.backends.redis.examination import _TRIED, _kind, commands_of
from celery_relock.backends.redis.inspection import Inspection
from celery_relock.backends.redis.scripts import scripts
from celery_relock.engine.inspection import Examination
from celery_relock.errors import LockConfigError
from tests.support import RedisServer, new_namespace
from tests.support.backends import backend_of, close
from tests.support.cluster import ClusterServers
from tests.support.missing import binary_of
from tests.support.worker import ROOT

# What the page says that a user needs, for locks and to be looked at.
FOR_A_LOOK = ["+info", "+config|get", "+scan", "+hscan", "+dbsize", "+memory|usage", "+wait"]
BASIS = ["+eval", "+evalsha", "+publish", "+subscribe", "+ping", "+select", "+client|setname"]
COMMANDS = [*BASIS, *(f"+{name.lower()}" for name in commands_of(scripts()) if name != "PUBLISH")]
NAMED = ["~relock:*", "&relock:*"]
EVERYTHING = ["resetkeys", "resetchannels", *NAMED, "nocommands", *COMMANDS, *FOR_A_LOOK]


@pytest.fixture(scope="module", params=["this machine's Redis", "Redis 6.2", "Valkey"])
def server(request: pytest.FixtureRequest, redis_binary: str) -> Iterator[RedisServer]:
    """They refuse in different words."""
    started = RedisServer(binary=binary_of(request.param, redis_binary))
    yield started
    started.stop()


@pytest.fixture
def as_user(server: RedisServer) -> Iterator[Callable[..., Examination]]:
    made = []

    def log_in(rules: list[str], name: str = "") -> Examination:
        name = name or uuid.uuid4().hex
        server.client().execute_command("ACL", "SETUSER", name, "on", ">secret", *rules)
        url = f"redis://{name}:{quote('secret')}@127.0.0.1:{server.port}/1"
        made.append(backend_of(url, "relock", replicas=Replicas(1)))
        return made[-1].examination()

    yield log_in
    for backend in made:
        close(backend.transport)


def test_every_command_of_every_script_is_tried() -> None:
    for variant in ("server", "cluster"):
        assert set(commands_of(scripts(variant))) <= set(_TRIED)


def test_whoever_may_do_all_of_it_lacks_nothing_and_nothing_is_left_behind(
    server: RedisServer, as_user: Callable[..., Examination]
) -> None:
    asks = as_user(EVERYTHING)
    assert asks.refused() == []
    assert asks.memory(1000) is not None
    assert not Inspection(*asks).has_layout()
    assert server.client(db=1).dbsize() == 0


def test_each_permission_that_is_missing_is_named(
    server: RedisServer, as_user: Callable[..., Examination]
) -> None:
    for missing in [*COMMANDS, *FOR_A_LOOK, *NAMED]:
        asks = as_user([rule for rule in EVERYTHING if rule != missing])
        if missing in ("+select", "+client|setname"):  # nobody gets as far as that without them
            with pytest.raises(LockConfigError, match="ACL SETUSER"):
                asks.refused()
            continue
        assert asks.refused() == [missing]
        assert (asks.memory(10) is None) == (missing in ("+scan", "+dbsize"))
    assert server.client(db=1).dbsize() == 0


@pytest.mark.parametrize("name", ["channels", "shop-key", "access"])
def test_a_permission_that_is_missing_is_not_sought_in_the_name_of_the_user(
    as_user: Callable[..., Examination], name: str
) -> None:
    for missing in ("+zadd", "+config|get", "+subscribe", *NAMED):
        rules = [rule for rule in EVERYTHING if rule != missing]
        assert as_user(["reset", "on", ">secret", *rules], name).refused() == [missing]


def test_a_cluster_that_has_no_sharded_channels_forbids_nothing(redis_binary: str) -> None:
    cluster = ClusterServers(binary_of("Redis 6.2", redis_binary), replicas=False)
    try:
        assert cluster.backend(new_namespace()).examination().refused() == []
    finally:
        cluster.stop()


def test_every_key_of_the_catalogue_is_of_a_kind() -> None:
    catalogue = (ROOT / "lua" / "README.md").read_text()
    keys = re.findall(r"^\| `([a-z]+)[^`]*` \| (?!channel)", catalogue, re.MULTILINE)
    assert {"l", "sent", "live"} <= set(keys)
    assert [key for key in keys if _kind(key) == "other"] == []


def test_keys_are_counted_by_their_kind_and_foreign_ones_do_no_harm(server: RedisServer) -> None:
    namespace, url = new_namespace(), server.url
    backend, client = backend_of(url, namespace), server.client()
    keys = [f"{namespace}:{{0}}:{rest}" for rest in ("l:a", "l:dedup\tb", "q:a", "d:1", "d:2")]
    for key in (*keys, f"{namespace}:{{0}}:x:1", "other:{0}:meta", "foreign"):
        client.set(key, "x" * 1000)
    client.set(b"\xff\x00" + namespace.encode(), b"\xff")
    client.set(namespace.encode() + b":{0}:l:\xff", b"\xff")
    found = backend.examination().memory(10_000)
    assert found is not None
    counted = {kind.name: kind.keys for kind in found.kinds}
    assert counted == {
        "locks": 2,
        "dedup markers": 1,
        "queues": 1,
        "ended executions": 2,
        "other": 1,
    }
    assert found.namespaces == ("other",)
    assert found.seen == found.keys == client.dbsize()
    assert all(kind.bytes_each > 900 for kind in found.kinds)
    close(backend.transport)
