"""A killed process's locks are free as soon as it is dead, though their leases are two minutes."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from celery_relock import Lock
from celery_relock.core import journal as journals
from tests.support import wait_for

APP = "tests.celery.apps.reaping"


def _lock(worker, name="account:7"):
    conf = worker.module.app.conf
    return Lock(conf.relock_url, name, namespace=conf.relock_namespace)


def _freed_within(lock, seconds):
    started = time.monotonic()
    wait_for(lambda: not lock.locked(), timeout=seconds, what=f"{lock.name} to be free")
    return time.monotonic() - started


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSEGV], ids=lambda sig: sig.name)
def test_a_killed_childs_locks_are_free_at_once_and_the_next_one_runs(worker, sig):
    running = worker(APP, concurrency=2)
    lock, inner = _lock(running), _lock(running, "inner")
    running.module.hold.delay("7", inner="inner")
    held = running.journal.wait_for("holding", timeout=20)[0]
    running.journal.wait_for("inner", timeout=20)
    running.module.follow.delay("7")
    wait_for(lambda: lock._engine.inspect(lock.name).waiting == 1, what="the next one in line")

    running.kill(sig, pid=held.pid)
    followed = running.journal.wait_for("followed", timeout=5)[0]

    assert followed["fence"] > held["fence"]
    _freed_within(inner, 5)
    running.wait_for_log("reclaimed")


def test_a_child_beyond_its_hard_time_limit_keeps_its_lock_until_it_is_dead(worker):
    running = worker(APP, concurrency=2)
    running.module.overrun.delay("7")
    running.journal.wait_for("alive", timeout=20)
    running.module.follow.delay("7")

    followed = running.journal.wait_for("followed", timeout=20)[0]

    alive = running.journal.events("alive")
    assert max(event["at"] for event in alive) < followed["at"]
    assert followed["fence"] > alive[-1]["fence"]


def test_what_a_killed_worker_held_is_freed_by_another_worker_of_the_host(worker):
    first, second = worker(APP, concurrency=1), worker(APP, concurrency=1)
    first.module.hold.delay("7")
    held = first.journal.wait_for("holding", timeout=20)[0]
    parent = psutil.Process(held.pid).ppid()
    doomed, other = (first, second) if first.pid == parent else (second, first)
    children = doomed.children()
    doomed.kill()
    for child in children:  # they go with their parent, where the system has PDEATHSIG
        psutil.Process(child).kill() if psutil.pid_exists(child) else None

    _freed_within(_lock(other), 5)
    other.wait_for_log("reclaimed")


def test_a_worker_that_starts_frees_what_the_dead_of_its_host_still_hold(worker):
    first = worker(APP, concurrency=1)
    first.module.hold.delay("7")
    held = first.journal.wait_for("holding", timeout=20)[0]
    first.close()
    lock = _lock(first)
    assert lock.locked()
    assert (journals.folder()).exists()

    second = worker(APP, concurrency=1)

    _freed_within(lock, 5)
    second.wait_for_log(f"process {held.pid} of this host, is dead")


def test_the_locks_of_the_living_are_left_alone(worker):
    running = worker(APP, concurrency=3)
    running.module.hold.delay("7")
    running.module.hold.delay("8")
    running.journal.wait_for("holding", timeout=20, count=2)
    victim = next(e for e in running.journal.events("holding") if e["account"] == "7")

    running.kill(signal.SIGKILL, pid=victim.pid)
    _freed_within(_lock(running), 5)

    worker(APP, concurrency=1)  # its first look goes over everything
    assert _lock(running, "account:8").locked()
