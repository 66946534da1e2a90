"""What of a server's settings can lose parked messages, or stops every lock: nothing else."""

from __future__ import annotations

import pytest

from celery_relock.engine import diagnosis
from celery_relock.engine.inspection import Server
from tests.support.backends import backend_of, close

SERIOUS = [
    ("version", {"redis_version": "6.0.16"}),
    ("role", {"role": "slave"}),
    ("eviction", {"maxmemory_policy": "allkeys-lru"}),
    ("persistence", {"aof_enabled": "0"}),
    ("persistence", {"rdb_last_bgsave_status": "err"}),
    ("replicas", {"connected_slaves": "1"}),
]


@pytest.mark.parametrize(("check", "info"), SERIOUS)
def test_what_loses_parked_messages_or_stops_every_lock_is_serious(check, info):
    server = Server(info, "", (0.0, 0.0), (), needed=2)

    assert [each.check for each in diagnosis.serious([server])] == [check]


def test_what_is_slow_or_nearly_full_or_enough_is_not():
    full = {"maxmemory": "100", "used_memory": "99", "maxclients": "10", "connected_clients": "10"}
    kept = {"aof_enabled": "0", "connected_slaves": "1"}
    server = Server({**full, **kept}, "900 1", (5.0, 0.0), (2.0,) * 5, needed=1)

    assert list(diagnosis.serious([server])) == []
    told = {each.check for each in diagnosis.of_servers([server])}
    assert told == {"memory", "clock", "latency", "connections"}


def test_of_several_servers_it_is_said_which_of_them_it_is():
    well = Server({}, "900 1", (0.0, 0.0), (), at="a:1")
    evicts = well._replace(info={"maxmemory_policy": "allkeys-lru"})
    servers = [well, evicts._replace(at="b:2"), evicts._replace(at="c:3")]

    [finding] = diagnosis.of_servers(servers)

    assert finding.what.endswith(", though maxmemory is not set so far (b:2, c:3)")
    [alone] = diagnosis.of_servers([evicts._replace(at="")])
    assert alone.what.endswith(", though maxmemory is not set so far")


def test_what_a_user_may_not_ask_is_not_complained_of(own_redis):
    server = own_redis("--save", "")
    user = ("worker", "on", ">pw", "~*", "&*", "+@all", "-config", "-info")
    server.client().execute_command("ACL", "SETUSER", *user)
    backend = backend_of(server.url.replace("redis://", "redis://worker:pw@"), "ns")

    found = list(diagnosis.serious(backend.examination().servers(0)))

    close(backend.transport)
    assert found == []
