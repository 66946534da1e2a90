"""The locks are on a Redis of their own, the broker on another one or on RabbitMQ."""

from __future__ import annotations

import json
import time
import uuid
from urllib.parse import quote

import pytest
from celery import chain

from tests.support import RedisServer, leftovers, new_namespace, wait_for
from tests.support.missing import missing
from tests.support.parked import held_here, state_of, wait_until_parked
from tests.support.permissions import PASSWORD, least
from tests.support.ports import free_port
from tests.support.tls import Authority, speaks_tls


@pytest.fixture(scope="module")
def locks(redis_binary, tmp_path_factory):
    """The Redis of the locks: by TCP, by TLS, and for a user with the least rights."""
    tls, config, options = free_port(), (), {}
    folder = tmp_path_factory.mktemp("tls")
    if speaks_tls(redis_binary):
        try:
            authority = Authority(folder)
        except FileNotFoundError:
            missing("no openssl command")
        config = authority.server_config(port=tls)
        certificate, key = authority.certificate("worker")
        options = {
            "ssl_ca_certs": authority.ca,
            "ssl_certfile": certificate,
            "ssl_keyfile": key,
        }
    server = RedisServer(*config, binary=redis_binary)
    server.tls_url, server.tls_options = f"rediss://localhost:{tls}/2", options
    yield server
    server.stop()


@pytest.fixture(scope="module", params=["no results", "rabbitmq", "least rights", "tls"])
def worker(request, module_worker, on_broker, locks):
    """A worker whose results, but for the first two, are with the broker; its locks never are."""
    env, namespace = {"RELOCK_TEST_LOCKS": locks.url}, new_namespace()
    if request.param in ("no results", "rabbitmq"):
        env["RELOCK_TEST_RESULTS"] = "none"
    if request.param == "rabbitmq":
        env |= on_broker("amqp")
    if request.param == "least rights":
        rules = [rule.replace("relock", namespace) for rule in least()]
        locks.client().execute_command("ACL", "SETUSER", "worker", "on", f">{PASSWORD}", *rules)
        login = f"worker:{quote(PASSWORD, safe='')}"
        env["RELOCK_TEST_LOCKS"] = f"redis://{login}@127.0.0.1:{locks.port}/0"
    if request.param == "tls":
        if not locks.tls_options:
            missing("this Redis was built without TLS")
        env["RELOCK_TEST_LOCKS"] = locks.tls_url
        env["RELOCK_TEST_TLS"] = json.dumps(locks.tls_options)
    started = module_worker("tests.worker.apps.separate", env=env, namespace=namespace)
    yield started
    started.close()


@pytest.fixture
def held(worker):
    """A lock that this process has, by the same way to the Redis as the worker's."""
    with held_here(worker, f"account:{uuid.uuid4().hex}") as lock:
        yield lock


def _told(worker, name, lock):
    return worker.journal.wait_for(name, 20, lock=lock)[0]


def test_a_hold_is_renewed_and_an_execution_is_parked_and_resumed_and_its_chain_goes_on(
    worker, held, client
):
    other, fence = f"account:{uuid.uuid4().hex}", held.fence
    worker.module.stays.delay(other)
    _told(worker, "in", other)
    lapses = time.monotonic() + 3.2
    (before,) = state_of(worker, other).holders

    chain(worker.module.takes.si(held.name), worker.module.note.si(held.name)).apply_async()
    wait_until_parked(worker, held.name)
    held.release()
    assert _told(worker, "took", held.name)["fence"] > fence
    _told(worker, "noted", held.name)

    wait_for(lambda: time.monotonic() > lapses, what="the end of the first lease")
    assert state_of(worker, other).holders[0].token == before.token
    worker.journal.add("free", lock=other)
    _told(worker, "still in", other)
    assert leftovers(client, worker.namespace) == [], "at the broker"
    assert "hears of" not in worker.log()
