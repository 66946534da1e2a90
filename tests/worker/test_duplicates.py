"""A message delivered twice: its copy never runs beside it, and takes its place if it dies."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.support import new_namespace, wait_for
from tests.support.apps import LOOK_EVERY
from tests.support.messages import Message
from tests.support.parked import lock_of, state_of, wait_until_parked
from tests.support.tcp import TcpProxy

APP = "tests.worker.apps.duplicates"


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker(APP, concurrency=3, env={LOOK_EVERY: "0.2"})


def wait_until_settled(twin, client):
    """The worker's main process is done with it: it has acknowledged or rejected it."""
    prefix = twin.app.conf.broker_transport_options["global_keyprefix"]
    mine = twin.id.encode()
    wait_for(lambda: not any(mine in one for one in client.hvals(f"{prefix}unacked")))


@pytest.fixture
def message(worker):
    made = []

    def make(name, **options):
        task = getattr(worker.module, name) if isinstance(name, str) else name
        made.append(Message(worker, task, **options))
        return made[-1]

    yield make
    for one in made:
        one.let_go()


WAIT = ["works", "works_or_raises", "works_or_drops", "works_or_blocks"]


@pytest.mark.parametrize("name", [*WAIT, "works_acked_late"])
def test_a_copy_waits_behind_the_execution_and_is_discarded_after_its_clean_end(
    worker, message, name
):
    twin = message(name)
    twin.deliver()
    twin.events("inside", count=1)
    twin.deliver()
    # The copy was looked at, and put off, while the first one was inside.
    put_off = twin.events("over", count=1)
    assert [e["state"] for e in put_off] == ["IGNORED"]
    assert twin.result.state == "PENDING", "the copy wrote a state over that of the first"
    twin.let_go()
    assert twin.result.get(timeout=20) == "run 1"
    # It was parked behind the execution, and went with it; or came once more, and found the result.
    ignored = 2 if name == "works_acked_late" else 1
    assert sorted(twin.states(ignored + 1)) == ["IGNORED"] * ignored + ["SUCCESS"]
    assert twin.result.get(timeout=20) == "run 1"
    assert len(twin.permits()) == 1


@pytest.fixture(scope="module", params=["threads", "gevent"])
def pool(request, module_worker):
    return module_worker(APP, pool=request.param, concurrency=4, namespace=new_namespace())


@pytest.mark.parametrize("name", ["works", "works_or_raises", "works_acked_late"])
def test_a_copy_that_comes_to_the_very_process_of_the_execution_is_one_too(pool, name):
    twin = Message(pool, getattr(pool.module, name))
    twin.deliver()
    (first,) = twin.events("inside", count=1)
    twin.deliver()
    assert twin.states(1) == ["IGNORED"]
    twin.let_go()
    assert twin.result.get(timeout=20) == "run 1"
    # One that was parked went with it, one that was sent again comes to nothing like any other.
    twin.deliver()
    ends = twin.events("over", count=4 if name == "works_or_raises" else 3)
    assert sorted(e["state"] for e in ends) == [*["IGNORED"] * (len(ends) - 1), "SUCCESS"]
    assert {e.pid for e in ends} == {first.pid}
    assert len(twin.permits()) == 1


@contextmanager
def _stored(twin, client):
    """Every state that is stored for the task meanwhile, one after another."""
    with client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(twin.app.backend.get_key_for_task(twin.id))
        wait_for(lambda: heard.subscribed)
        states = []

        def look():
            while told := heard.get_message():
                states.append(json.loads(told["data"])["status"])
            return states

        yield look


@pytest.mark.parametrize(
    ("name", "ends"),
    [("fails_and_tracks", 2), ("fails_and_tracks_or_comes_back", 3)],  # a parked one goes with it
)
def test_a_copy_stores_no_state_where_celery_tracks_the_start(worker, message, client, name, ends):
    twin = message(name)
    with _stored(twin, client) as states:
        twin.deliver()
        twin.events("inside", count=1)
        wait_for(lambda: states() == ["STARTED"])
        assert twin.result.info == {"pid": twin.events("inside")[0].pid, "hostname": worker.node}
        twin.deliver()
        twin.events("over", count=1)
        twin.let_go()
        twin.events("over", count=ends)
        twin.deliver()
        over = twin.states(ends + 1)
        assert sorted(over) == ["FAILURE", *["IGNORED"] * ends]
        wait_for(lambda: "FAILURE" in states())
        assert states() == ["STARTED", "FAILURE"]
    assert len(twin.permits()) == 1


@pytest.mark.parametrize("name", WAIT)
def test_a_copy_takes_over_when_the_execution_was_killed(worker, message, name):
    twin = message(name)
    twin.deliver()
    (first,) = twin.events("inside", count=1)
    twin.deliver()
    twin.events("over", count=1)
    worker.kill(signal.SIGKILL, pid=first.pid)
    _, second = twin.events("inside", count=2)
    assert second["header"]["execution_id"] == first["header"]["execution_id"]
    # Celery looks for a success, and then stores the failure: one that came between would be lost.
    twin.events("failed", count=1)
    twin.let_go()
    twin.events("over", count=2)
    assert twin.result.get(timeout=20, propagate=False) == "run 2"


@pytest.mark.parametrize("name", ["works", "works_acked_late", "works_without_a_result"])
def test_a_copy_that_comes_after_the_end_is_discarded(worker, message, name):
    twin = message(name)
    twin.deliver()
    twin.let_go()
    twin.events("over", count=1)
    if name == "works_acked_late":
        twin.result.get(timeout=20)
    twin.deliver()
    states = twin.states(2)
    assert states == ["SUCCESS", "IGNORED"]
    assert len(twin.permits()) == 1


def test_a_copy_after_the_end_is_discarded_where_only_the_sender_hears_of_the_result(module_worker):
    worker = module_worker(
        APP, concurrency=3, namespace=new_namespace(), env={"RELOCK_TEST_RESULTS": "rpc://"}
    )
    twin = Message(worker, worker.module.works_acked_late)
    twin.let_go()
    twin.deliver()
    twin.events("over", count=1)
    twin.deliver()
    assert twin.states(2) == ["SUCCESS", "IGNORED"]
    assert len(twin.permits()) == 1


@pytest.mark.parametrize(
    "name", ["rejects", "fails_unacknowledged", "autoretries_in_vain_unacknowledged"]
)
def test_a_message_that_was_not_acknowledged_runs_each_time_a_redrive_brings_it_back(
    worker, message, client, name
):
    # As SQS does it from its dead-letter queue: byte for byte the same message.
    dead = message(name)
    dead.let_go()
    for number in (1, 2, 3):
        dead.deliver()
        assert len(dead.events("over", count=number)) == number
        # The main process stores the failure of a rejected one, after the child's end of it.
        wait_until_settled(dead, client)

    assert dead.result.get(timeout=20) == "run 3"
    assert len(dead.permits()) == 3


# The ways in which a task of the app is refused its lock, if that is held.
REFUSED = [
    *("raises", "drops", "blocks", "waits", "retries"),
    *("is one too many", "waits in its order", "is misled"),
]


def refuse(worker, twin, how="raises"):
    """Let an execution end without its lock, which is free then."""
    twin.let_go()
    told = ["SUCCESS" if how == "drops" else "FAILURE"]
    with lock_of(worker, twin.lock):
        if how == "is one too many":
            Message(worker, worker.module.works, twin.account).deliver()
            wait_until_parked(worker, twin.lock)
            told.append("SUCCESS")
        twin.deliver()
        wait_for(lambda: told[0] in [each["state"] for each in twin.events("over")])
    wait_for(lambda: {*told} <= {each["state"] for each in twin.events("over")})
    return told[0]


def ran(twin):
    return twin.execution_id in [each["header"]["execution_id"] for each in twin.events("inside")]


@pytest.mark.parametrize("acks", ["early", "late"])
@pytest.mark.parametrize("how", REFUSED)
def test_a_copy_of_an_execution_that_was_refused_its_lock_is_discarded(worker, message, how, acks):
    """What its caller was told stays true."""
    twin = message(worker.module.may_be_refused[acks][how])
    told = refuse(worker, twin, how)
    ends = len(twin.events("over"))
    assert twin.result.state == told
    twin.deliver()
    assert twin.states(ends + 1)[-1] == "IGNORED"
    assert twin.result.state == told
    assert not ran(twin)


def test_the_end_of_a_copy_is_not_that_of_the_execution_which_lives(worker, message):
    twin = message("works_or_stays_in_its_slot")
    twin.deliver()
    (first,) = twin.events("inside", count=1)
    twin.deliver(timelimit=(None, 1))
    assert twin.states(1) == ["FAILURE"], "the time limit strikes while the copy waits"
    worker.kill(signal.SIGKILL, pid=first.pid)
    twin.let_go()
    twin.deliver()
    assert twin.states(2) == ["FAILURE", "SUCCESS"]


def test_a_message_that_was_refused_its_lock_and_rejected_runs_when_a_redrive_brings_it_back(
    worker, message, client
):
    dead = message("is_refused_unacknowledged")
    refuse(worker, dead)
    wait_until_settled(dead, client)
    dead.deliver()
    assert dead.states(2) == ["FAILURE", "SUCCESS"]


def test_a_task_that_was_refused_its_lock_and_is_sent_again_with_the_same_id_runs(worker, message):
    """By a process without the library: it cannot be told from a copy."""
    twin = message("works_or_raises", with_header=False)
    refuse(worker, twin)
    twin.deliver()
    assert twin.states(2) == ["FAILURE", "SUCCESS"]


def test_a_copy_of_an_execution_whose_conflict_is_retried_is_discarded(worker, message, client):
    twin = message("retries_its_conflict")
    twin.let_go()
    with lock_of(worker, twin.lock):
        twin.deliver()
        twin.events("over", count=1)
        end = f"{worker.namespace}:*:d:{twin.execution_id}"
        wait_for(lambda: client.keys(end), what="its end to be remembered")
    twin.deliver()
    assert twin.states(3) == ["RETRY", "IGNORED", "SUCCESS"]


def test_an_execution_that_died_before_its_result_was_stored_is_done_again(worker, message):
    # acks_late: its message is delivered again on purpose, though its body had come to an end.
    twin = message("dies_before_its_result_is_stored")
    twin.let_go()
    twin.deliver()
    first, second = twin.events("inside", count=2)
    assert first.pid != second.pid
    assert twin.result.get(timeout=20) == "run 2"
    assert len(twin.permits()) == 2
    # And what comes later still is a copy of both.
    twin.deliver()
    assert twin.events("over", count=2)[-1]["state"] == "IGNORED"
    assert len(twin.permits()) == 2


@pytest.mark.parametrize("with_header", [True, False])
def test_what_has_to_be_done_again_is_parked_while_somebody_holds_its_lock(
    worker, message, with_header
):
    """Also if its execution got an id of its own when it was parked before."""
    twin = message("dies_before_its_result_is_stored", with_header=with_header)
    twin.let_go()
    other = lock_of(worker, twin.lock)
    with ThreadPoolExecutor(1) as thread:
        with lock_of(worker, twin.lock):
            twin.deliver()
            wait_until_parked(worker, twin.lock)
            acquires = thread.submit(other.acquire)
            wait_for(lambda: state_of(worker, twin.lock).waiting == 2)
        assert acquires.result(20)
        wait_until_parked(worker, twin.lock)
        thread.submit(other.release).result(20)
    assert twin.result.get(timeout=20) == "run 2"


def test_an_execution_that_came_back_and_died_before_its_result_was_stored_is_done_again(
    worker, message
):
    """The state RETRY is that of the delivery which found the lock held."""
    twin = message("comes_back_and_dies_before_its_result_is_stored")
    twin.let_go()
    with lock_of(worker, twin.lock):
        twin.deliver()
        wait_for(lambda: twin.result.state == "RETRY")
    twin.events("inside", count=2)
    wait_for(lambda: twin.result.state == "SUCCESS", 20)
    assert twin.result.get() == "run 2"


def test_a_retry_that_died_before_its_result_was_stored_is_done_again(worker, message):
    """The state RETRY is that of the attempt before."""
    twin = message("retries_and_dies_before_its_result_is_stored")
    twin.let_go()
    twin.deliver()
    wait_for(lambda: twin.result.state == "SUCCESS", 20)
    assert twin.result.get() == "run 3"


RETRIES = [
    "retries_acked_late",
    "retries_after_its_body",
    "retries_for_a_conflict_of_its_own",
    "retries_in_its_order",
    "autoretries_unacknowledged",
]


@pytest.mark.parametrize(("retries", "attempts"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("name", RETRIES)
def test_a_copy_of_an_execution_that_has_sent_its_retry_is_discarded(
    worker, message, client, name, retries, attempts
):
    """Also if its message was parked before, and resumed twice, or is a retry itself."""
    twin = message(name, retries=retries, attempts=attempts)
    a_copy_comes_after_the_retry_was_sent(worker, twin, client)
    assert len(twin.permits()) == 2


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("name", ["retries_with_its_lock", "retries_with_the_lock_of_its_workflow"])
def test_so_is_one_of_an_execution_that_has_left_its_lock_to_its_retry(
    worker, message, client, name, retries
):
    twin = message(name, retries=retries)
    a_copy_comes_after_the_retry_was_sent(worker, twin, client)
    assert len(twin.events("inside")) == 2


def a_copy_comes_after_the_retry_was_sent(worker, twin, client):
    twin.let_go()
    twin.deliver()
    wait_for(lambda: twin.result.state == "RETRY")
    end = f"{worker.namespace}:*:d:{twin.execution_id}"
    wait_for(lambda: client.keys(end), what="its end to be remembered")
    twin.deliver()
    twin.events("over", count=2)
    assert state_of(worker, twin.lock).parked == 0, "it waits, as one that has to run"
    over = twin.states(3)
    assert sorted(over) == ["IGNORED", "RETRY", "SUCCESS"]
    assert twin.result.get(timeout=20) == "run 2"


@pytest.mark.parametrize("retry", ["waits", "runs"])
def test_a_copy_that_comes_when_the_retry_of_its_execution_waits_or_runs_is_discarded(
    worker, message, retry
):
    """And is not parked as one that has to run: its turn could come when a next retry waits."""
    twin = message("retries_and_runs_on")
    twin.let_go()
    twin.deliver()
    wait_for(lambda: twin.result.state == "RETRY")
    with lock_of(worker, twin.lock):
        wait_until_parked(worker, twin.lock)
        if retry == "waits":
            twin.deliver()
            twin.events("over", count=3)
            assert state_of(worker, twin.lock).parked == 1
    wait_for(lambda: twin.result.state == "STARTED")
    if retry == "runs":
        twin.deliver()
        twin.events("over", count=3)
        assert state_of(worker, twin.lock).parked == 0
    worker.journal.add(f"end {twin.account}")
    assert twin.result.get(timeout=20) == "run 2"
    assert len(twin.permits()) == 2


def test_a_copy_of_a_late_acknowledged_execution_without_a_result_runs_again(worker, message):
    # Nothing tells whether it was finished: at least once is what acks_late promises.
    twin = message("ignores_acked_late")
    twin.let_go()
    twin.deliver()
    twin.events("over", count=1)
    twin.deliver()
    twin.events("inside", count=2)
    assert len(twin.permits()) == 2


def test_a_copy_of_an_execution_that_celery_cancelled_before_it_stored_its_result_runs_again(
    new_worker, redis_server
):
    """The connection to the broker was lost, and Celery has stored RETRY. That is not the RETRY of
    a body, whose message is on its way."""
    with TcpProxy(redis_server.port) as proxy:
        broker = {"RELOCK_TEST_BROKER": f"redis://127.0.0.1:{proxy.port}/0"}
        worker = new_worker(APP, concurrency=2, env=broker)
        worker.journal.add("free cut")
        result = worker.module.is_long_in_storing_its_result.delay("cut")
        worker.journal.wait_for("storing")
        proxy.cut()
        wait_for(lambda: result.state == "RETRY", what="the cancel")
        assert result.get(timeout=30) == "run 2"


def test_a_task_sent_again_on_purpose_with_the_same_id_runs_again(worker, message):
    twin = message("works")
    twin.let_go()
    task = worker.module.works
    for expected in ("run 1", "run 2"):
        task.apply_async((twin.account,), task_id=twin.id)
        twin.events("over", count=int(expected[-1]))
    assert len(twin.permits()) == 2
    headers = [e["header"]["execution_id"] for e in twin.events("inside")]
    assert len(set(headers)) == 2


def test_messages_without_the_header_exclude_each_other_and_none_is_taken_for_late(worker, message):
    # Sent by a process that does not have the library: a copy cannot be told from a second call.
    twin = message("works", with_header=False)
    twin.deliver()
    twin.events("inside", count=1)
    twin.deliver()
    twin.events("over", count=1)
    twin.let_go()
    twin.events("inside", count=2)
    twin.events("over", count=3)
    twin.deliver()
    twin.events("inside", count=3)
    assert len(twin.permits()) == 3
