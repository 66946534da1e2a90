"""What of a server's settings can lose parked messages, or stops every lock: nothing else."""

from __future__ import annotations

import pytest

from celery_relock.backends.redis.connections import Replicas
from celery_relock.engine.diagnosis import serious
from tests.support import wait_for
from tests.support.backends import backend_of, close


def dangers_of(url, **options):
    backend = backend_of(url, "ns", **options)
    found = [f"{each.what}. {each.do}" for each in serious(backend.examination().servers(0))]
    close(backend.transport)
    return found


@pytest.fixture
def dangers(own_redis):
    """What is said of a server with these settings."""

    def ask(*config, user=None):
        server = own_redis(*config)
        if user:
            server.client().execute_command("ACL", "SETUSER", *user)
        url = server.url if not user else server.url.replace("redis://", f"redis://{user[0]}:pw@")
        return dangers_of(url)

    return ask


def test_a_server_that_keeps_nothing_on_disk_is_told(dangers):
    (text,) = dangers("--save", "", "--appendonly", "no")

    assert "nothing on disk" in text
    assert "appendonly" in text


@pytest.mark.parametrize("kept", [("--appendonly", "yes"), ("--save", "60", "1")])
def test_a_server_that_keeps_its_data_is_well(dangers, kept):
    off = ("--save", "") if kept[0] == "--appendonly" else ("--appendonly", "no")

    assert dangers(*off, *kept) == []


def test_a_server_that_may_throw_keys_away_is_told(dangers):
    (text,) = dangers("--appendonly", "yes", "--maxmemory-policy", "allkeys-lru")

    assert "allkeys-lru" in text
    assert "noeviction" in text


def test_a_server_with_too_few_replicas_is_told(own_redis):
    def ask(server, needed):
        return dangers_of(server.url, replicas=Replicas(needed))

    master, replica = own_redis("--appendonly", "yes"), own_redis()
    replica.client().replicaof("127.0.0.1", master.port)
    wait_for(lambda: master.client().info("replication")["connected_slaves"] == 1)

    assert ask(master, 0) == ask(master, 1) == []
    (text,) = ask(master, 2)
    assert "has 1 replicas" in text
    assert "relock_min_replicas is 2" in text


def test_what_a_user_may_not_ask_is_not_complained_of(dangers):
    user = ("worker", "on", ">pw", "~*", "&*", "+@all", "-config", "-info")

    assert dangers("--save", "", user=user) == []
