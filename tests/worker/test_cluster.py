"""A real worker whose locks are in a Redis Cluster; the broker is another Redis."""

from __future__ import annotations

import time

import pytest
from celery import Celery, chain

from celery_relock import engines
from celery_relock.backends.redis.keys import CLUSTER_BUCKETS as BUCKETS
from celery_relock.backends.redis.keys import Keys
from celery_relock.declaration import engine_of
from celery_relock.errors import LockConfigError
from tests.support import leftovers, new_namespace, wait_for
from tests.support.parked import lock_of, state_of, wait_until_parked
from tests.support.permits import permits

ACCOUNTS = "abcde"


@pytest.fixture(scope="module")
def cluster(cluster_with_replicas):
    return cluster_with_replicas


@pytest.fixture(scope="module")
def started(module_worker, cluster):
    """One worker for all: it lives through whatever happens to the cluster."""
    namespace = new_namespace()
    env = {"RELOCK_TEST_LOCKS": cluster.url}
    worker = module_worker(
        "tests.worker.apps.clustered", env=env, namespace=namespace, concurrency=4
    )
    yield worker
    worker.close()


@pytest.fixture
def worker(started, cluster):
    yield started
    cluster.mend()


def done(worker, count, timeout=60.0):
    return worker.journal.wait_for("done", timeout, count)


def so_far(worker):
    return worker.journal.names().count("done")


def in_use(cluster, worker):
    """The keys of locks and places in all of the cluster."""
    namespace, found = worker.namespace, []
    for node in cluster.masters():
        found += leftovers(cluster.admin(node), namespace)
    there = (":meta", ".resumed")  # the last: which resume queues live workers consume
    return [key for key in found if "}:d:" not in key and not key.endswith(there)]


def assert_one_at_a_time(worker):
    events = worker.journal.events()
    return {name: permits(events, f"account:{name}") for name in ACCOUNTS}


def test_executions_that_wait_and_executions_that_block_have_their_lock_one_after_another(
    cluster, worker
):
    before = so_far(worker)
    for number in range(30):
        task = worker.module.waits if number % 3 else worker.module.blocks
        task.delay(ACCOUNTS[number % 5])
    done(worker, before + 30)
    assert_one_at_a_time(worker)
    wait_for(lambda: not in_use(cluster, worker), what="all to be released")


def test_a_worker_of_gevent_goes_on_while_it_listens_at_each_node(module_worker, cluster):
    """Nothing that waits for the nodes keeps its greenlets waiting."""
    green = module_worker(
        "tests.worker.apps.clustered",
        pool="gevent",
        env={"RELOCK_TEST_LOCKS": cluster.url},
        namespace=new_namespace(),
        timeout=20,
    )
    with lock_of(green, "account:a"):
        green.module.waits.delay("a")
        wait_until_parked(green, "account:a")
    began = time.monotonic()
    done(green, 1, timeout=10)
    print(f"resumed after {time.monotonic() - began:.2f} s")


def test_two_locks_that_share_a_hash_tag_are_acquired_together(cluster, worker):
    before = so_far(worker)
    for number in range(24):
        worker.module.transfers.delay(ACCOUNTS[number % 5])
    done(worker, before + 24)
    assert_one_at_a_time(worker)
    for name in ACCOUNTS:
        for each in ("in", "out"):
            assert len(permits(worker.journal.events(), f"{{{name}}}:{each}")) >= 4
    wait_for(lambda: not in_use(cluster, worker), what="all to be released")


def test_a_workflow_keeps_its_lock_from_the_first_step_to_the_last(cluster, worker):
    before, step = so_far(worker), worker.module.step
    chain(step.si("a", 1, "go on"), step.si("a", 2), step.si("a", 3)).apply_async()
    worker.journal.wait_for("step")
    worker.module.waits.delay("a")
    name = "account:a"
    wait_for(lambda: state_of(worker, name).waiting, what="the stranger in line")
    worker.journal.add("go on")
    done(worker, before + 1)
    seen = [e for e in worker.journal.events() if e.name in ("step", "done")][before:]
    assert [e.name for e in seen] == ["step", "step", "step", "done"]
    assert len({e["fence"] for e in seen[:3]}) == 1
    wait_for(lambda: not in_use(cluster, worker), what="all to be released")


def test_a_parked_execution_is_resumed_when_the_slots_of_its_lock_have_moved(cluster, worker):
    before, name = so_far(worker), "account:b"
    worker.module.stays.delay("b")
    worker.journal.wait_for("in")
    worker.module.waits.delay("b")
    wait_for(lambda: state_of(worker, name).waiting, what="the parked execution")
    namespace = worker.namespace
    slot = cluster.slot_of(name, namespace)
    source = cluster.master_of_lock(name, namespace)
    to = next(node for node in cluster.masters() if node is not source)
    cluster.begin_move(slot, to)
    cluster.end_move(slot, source, to)
    worker.journal.add("free")
    done(worker, before + 1)
    assert_one_at_a_time(worker)


def test_parked_calls_whose_lock_has_another_name_when_they_come_back_run_once_and_hold_up_nobody(
    cluster, worker
):
    before, (today, tomorrow) = so_far(worker), ("f:today", "f:tomorrow")
    buckets = Keys(worker.namespace, BUCKETS)
    assert buckets.bucket(today) != buckets.bucket(tomorrow)
    with lock_of(worker, tomorrow) as occupied:
        with lock_of(worker, today):
            for number in range(4):
                worker.module.reports.delay("f", number)
                wait_until_parked(worker, today, number + 1)
            worker.journal.add("tomorrow")
        wait_until_parked(worker, tomorrow, 4)
        wait_for(lambda: state_of(worker, today).idle, what="nothing left where they were parked")
        assert occupied.owned()
    done(worker, before + 4, timeout=10)
    wait_for(lambda: not in_use(cluster, worker), what="all to be released")
    events = worker.journal.events("done")[before:]
    assert sorted(e["number"] for e in events) == [0, 1, 2, 3]


def test_the_bursts_of_each_node_are_sent_as_one_message(cluster, worker):
    before = so_far(worker)
    sent = [worker.module.merges.delay(ACCOUNTS[n % 5], n).id for n in range(25)]
    assert sent == sent[:5] * 5
    done(worker, before + 5)
    events = worker.journal.events("done")[before:]
    assert {e["task"]: e["number"] for e in events} == dict(zip(sent, range(20, 25), strict=False))
    wait_for(lambda: not in_use(cluster, worker), what="all to be released")
    assert so_far(worker) == before + 5


def test_a_master_is_killed_in_the_middle_of_locked_tasks_and_all_of_them_run_once(cluster, worker):
    before, namespace = so_far(worker), worker.namespace
    master = cluster.master_of_lock("account:c", namespace)
    for number in range(40):
        worker.module.waits.delay(ACCOUNTS[number % 5])
        if number == 15:
            done(worker, before + 5)
            killed = time.monotonic()
            cluster.fail_over(master)
    for _ in range(5):
        worker.module.transfers.delay("c")
    done(worker, before + 45, timeout=120)
    print(f"all done {time.monotonic() - killed:.1f} s after the master was killed")
    assert_one_at_a_time(worker)
    assert so_far(worker) == before + 45
    wait_for(lambda: not in_use(cluster, worker), 30, what="all to be released")


def test_an_app_may_name_the_cluster_by_a_client_or_a_function(cluster):
    there = engines.engine_for(cluster.url, "shop").backend
    with cluster.client() as client:
        for place in (cluster.url, client, lambda: client):
            app = Celery("shop", set_as_current=False)
            app.conf.update(relock_url=place, relock_namespace="shop", result_backend=None)
            assert engine_of(app).backend == there


def test_how_long_a_failover_is_waited_for_is_a_setting(cluster):
    app = Celery("shop", set_as_current=False)
    app.conf.update(relock_url=cluster.url, relock_transport_options={"patience": 4})
    assert engine_of(app).backend.transport._failover == 4
    app = Celery("shop", set_as_current=False)
    app.conf.update(relock_url=f"{cluster.url}?patience=soon")
    with pytest.raises(LockConfigError, match=r"patience='soon'.* numbers from 0"):
        engine_of(app)
