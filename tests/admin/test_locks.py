"""celery_relock.admin.Locks, beside a worker: who holds, who waits, why, and to free by hand."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery, chain, chord, group, states
from celery.app.control import Inspect
from celery.exceptions import Retry, TaskRevokedError

from celery_relock import Lock, LockedTask, signals
from celery_relock.admin import Locks
from celery_relock.admin.names import plain, typed
from celery_relock.declaration import engine_of
from celery_relock.engine import ids
from celery_relock.engine.events import label_of
from celery_relock.engine.protocol import LINE, MARKER, Debounce, ParkRequest
from celery_relock.errors import LockConfigError, LockUnavailable, RelockError
from celery_relock.worker.parking import home
from tests.support import Worker, wait_for
from tests.support.desk import Desk
from tests.support.messages import Message
from tests.support.monitor import Monitor
from tests.support.parked import wait_until_requeued
from tests.support.ports import free_port

# Celery's own, where a state is stored; in a worker nobody is told.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")


@pytest.fixture
def forced() -> Any:
    """What `lock_forced` told, as (action, names, task_id, by, origin)."""
    told: list[tuple[Any, ...]] = []

    def hear(sender: Any, **facts: Any) -> None:
        wanted = ("action", "names", "task_id", "by", "origin")
        told.append(tuple(facts[name] for name in wanted))

    signals.lock_forced.connect(hear, weak=False, dispatch_uid="here")
    yield told
    signals.lock_forced.disconnect(dispatch_uid="here")


def counted(call: Any, name: str, trips: list[str]) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        trips.append(name)
        return call(*args, **kwargs)

    return wrapper


def test_a_lock_tells_who_holds_it_and_who_waits_in_their_order(
    worker: Worker, locks: Locks, key: str, held: Any
) -> None:
    first, second = held.park(), held.park()
    blocks = held.wait(worker.module.block, "waiting")

    lock = locks.get(key)

    (holder,) = lock.holders
    assert (holder.task, holder.task_id) == ("tests.admin.apps.desk.hold", held.id)
    assert (holder.host, holder.pid) == (socket.gethostname(), worker.pid)
    assert holder.owner == held.id
    assert 0 < lock.at - holder.since < 30
    assert 0 < holder.lease_left <= 30
    assert (lock.held, lock.waiting, lock.parked) == (1, 3, 2)
    seen = [(each.position, each.state, each.task_id) for each in lock.waiters]
    assert seen == [(1, "parked", first), (2, "parked", second), (3, "waiting", blocks)]
    assert holder.since < lock.waiters[0].since < lock.waiters[2].since <= lock.at
    assert json.loads(json.dumps(lock.as_dict()))["holders"][0]["task_id"] == held.id
    assert [(each.name, each.waiting) for each in locks.find(key)] == [(key, 3)]


@pytest.mark.parametrize("name", [r"\ud800", r"\udfff!", r"\U0000d800", r"\U00110000"])
def test_what_is_no_character_is_no_name_that_was_written_out(locks: Locks, name: str) -> None:
    assert typed(name) == name
    assert locks.get(typed(name)).idle


@pytest.mark.parametrize("name", ["\x1b", "\u2028", "\U000e0001", "\U0010ffff"])
def test_what_is_not_printable_is_typed_as_it_is_shown(name: str) -> None:
    assert typed(plain(name)) == name != plain(name)


def test_a_lock_that_nobody_has_is_idle(locks: Locks, key: str) -> None:
    assert locks.get(key).idle
    assert list(locks.find(key)) == []
    assert locks.release(key) == ()


def test_why_says_it_in_a_sentence_within_five_round_trips(
    worker: Worker, locks: Locks, key: str, held: Any, trips: list[str], monkeypatch: Any
) -> None:
    module = worker.module
    parked = held.park()
    blocks = held.wait(module.block, "waiting")
    dropped, ended = module.drop.delay(key), module.linked.delay(1)
    assert ended.get(timeout=30) is None
    assert dropped.get(timeout=30)["relock"] == "dropped"
    runs = module.bare.delay(key)
    worker.journal.wait_for(f"inside {key}", count=2)
    for owner, name in ((module.app.backend, "get_task_meta"), (Inspect, "query_task")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), name, trips))
    expected = {
        held.id: ("holds", key),
        parked: ("parked", key),
        blocks: ("waits", key),
        dropped.id: ("dropped", key),
        ended.id: ("ended", ""),
        runs.id: ("runs", ""),
        "no-such-task": ("unknown", ""),
        "": ("unknown", ""),
    }

    for task_id, wanted in expected.items():
        trips.clear()
        why = locks.why(task_id)

        assert (why.state, why.lock) == wanted, why
        assert task_id in why.sentence
        looks_everywhere = why.state in ("unknown", "runs")
        assert looks_everywhere or 1 <= len(trips) <= 5, trips
    holder = f"tests.admin.apps.desk.hold[{held.id}]"
    assert holder in locks.why(parked).sentence
    assert holder in locks.why(blocks).sentence
    trips.clear()
    locks.get(key)
    assert len(trips) <= 5


def test_why_says_of_a_message_with_an_eta_that_a_worker_has_it(
    worker: Worker, locks: Locks, key: str, trips: list[str], monkeypatch: Any
) -> None:
    later = worker.module.bare.apply_async((key,), countdown=60)
    for owner, name in ((worker.module.app.backend, "get_task_meta"), (Inspect, "query_task")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), name, trips))
    wait_for(lambda: locks.why(later.id).state == "received", what="the message with an ETA")
    trips.clear()

    why = locks.why(later.id)

    assert why.lock == ""
    assert later.id in why.sentence
    assert 1 <= len(trips) <= 5
    worker.module.app.control.revoke(later.id)


def test_why_says_of_a_message_that_waits_for_its_rate_limit_that_a_worker_has_it(
    worker: Worker, locks: Locks, key: str
) -> None:
    worker.module.limited.delay(key).get(timeout=20)  # uses up the hour
    later = worker.module.limited.delay(f"{key} 2")
    try:
        wait_for(lambda: locks.why(later.id).state == "received", what="the message")
        sentence = locks.why(later.id).sentence
    finally:
        later.revoke()

    assert sentence.endswith(
        f"limited[{later.id}] waits in the worker {worker.node} for its rate limit"
    )


def test_why_says_of_a_task_that_was_parked_for_another_broker_that_no_worker_here_resumes_it(
    worker: Worker, key: str, held: Any
) -> None:
    """`broker_url`, or the app's name, was changed while it was parked."""
    conf = worker.module.app.conf
    moved = Celery("moved", broker=conf.broker_url, backend=conf.result_backend)
    names = ("relock_url", "relock_namespace", "result_backend_transport_options")
    moved.conf.update({name: conf[name] for name in names})
    parked = held.park()

    why = Locks(moved).why(parked)

    assert why.state == "parked"
    assert why.sentence.endswith(
        "; it was parked by another app, or for another broker: only a worker with that broker_url "
        "and that app name resumes it"
    )


def test_why_says_that_nobody_reads_the_queue_to_which_a_parked_task_returns(
    worker: Worker, locks: Locks, held: Any
) -> None:
    control, one = worker.module.app.control, [worker.node]
    control.add_consumer("elsewhere", destination=one, reply=True)
    parked, other = held.park(queue="elsewhere"), held.park()
    assert "queue 'elsewhere'" not in locks.why(parked).sentence
    control.cancel_consumer("elsewhere", destination=one, reply=True)
    ends = "; no worker that answers consumes its queue 'elsewhere'"
    try:
        wait_for(lambda: locks.why(parked).sentence.endswith(ends), what="nobody to read it")
        assert "consumes its queue" not in locks.why(other).sentence
    finally:
        control.add_consumer("elsewhere", destination=one, reply=True)


def test_why_names_the_first_in_the_queue_if_nobody_holds_the_lock(
    worker: Worker, locks: Locks, key: str, held: Any
) -> None:
    """Its message has gone back to a queue that nobody reads."""
    control, one = worker.module.app.control, [worker.node]
    control.add_consumer("elsewhere", destination=one, reply=True)
    first, other = held.park(queue="elsewhere"), held.park()
    control.cancel_consumer("elsewhere", destination=one, reply=True)
    unread = "no worker that answers consumes its queue"
    try:
        wait_for(lambda: unread in locks.why(first).sentence, what="nobody to read it")
        held.go()
        wait_for(lambda: not locks.get(key).held, what="the end of the holder")
        sentence = locks.why(other).sentence
    finally:
        control.add_consumer("elsewhere", destination=one, reply=True)

    name = worker.module.take.name
    assert sentence.endswith(
        "with 1 ahead of it; nobody holds it at this moment, and it is the turn of "
        f"{name}[{first}], whose message is on its way to a worker"
    )


def test_whose_message_nobody_has_published_is_not_said_to_be_on_its_way(
    redis_url: str, namespace: str
) -> None:
    """Its broker is another one, or cannot be reached."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace)
    desk = Desk(redis_url, namespace)
    try:
        desk.fence("r1")
        for run, of in (("r2", "elsewhere"), ("r3", home(app))):
            told = {"home": of, "queue": "", "headers": {}}
            desk.park(run, text=json.dumps(told), home=of, label=label_of("pay", f"t-{run}"))
        desk.release("r1", home=home(app))
        first, behind = (Locks(app).why(f"t-{run}") for run in ("r2", "r3"))
    finally:
        desk.wipe()
        desk.close()
        app.close()

    assert (first.state, behind.state) == ("owed", "parked")
    nobody = "message has not been published by any process"
    assert first.sentence.startswith("pay[t-r2] has its turn for the lock 'a' after ")
    assert f": its {nobody}; it was parked by another app" in first.sentence
    assert behind.sentence.endswith(f"it is the turn of pay[t-r2], whose {nobody}")


def test_a_holder_that_waits_for_another_lock_is_not_said_to_work(
    worker: Worker, locks: Locks, key: str, held: Any
) -> None:
    """Not its lock is to be released, but the other one."""
    outer = worker.module.takes_inside.delay(key)
    wait_for(lambda: locks.get(key).waiting == 1, what="the wait in its body")
    behind = worker.module.behind.delay(key)
    wait_for(lambda: locks.get(f"outer {key}").parked == 1, what="the one behind")
    waits = locks.why(behind.id)
    held.go()
    for each in (outer, behind):
        each.get(timeout=20)

    assert f"takes_inside[{outer.id}] has held it for " in waits.sentence
    assert waits.sentence.endswith(f", and waits for the lock '{key}' meanwhile")


def test_of_several_workers_the_one_that_runs_a_task_is_believed(
    worker: Worker, locks: Locks, key: str, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one can have a copy of its message, which the broker has delivered again."""
    ask = Inspect.query_task

    def both(self: Inspect, *ids: Any) -> Any:
        told = ask(self, *ids)
        (info,) = ([info] for _, info in told[worker.node].values())
        return {"another@web": {held.id: ["reserved", *info]}, **told}

    monkeypatch.setattr(Inspect, "query_task", both)
    assert locks.why(held.id).state == "holds"


def test_a_task_that_runs_is_not_parked_though_a_copy_of_its_message_is(
    worker: Worker, locks: Locks, key: str
) -> None:
    """Its broker has delivered it again, say after its visibility timeout."""
    case = Message(worker, worker.module.hold, key)
    case.deliver()
    worker.journal.wait_for(f"inside {key}")
    case.deliver()
    wait_for(lambda: locks.get(key).parked == 1, what="the copy to be parked")

    why, was_cancelled = locks.why(case.id), locks.cancel(case.id)
    state = case.result.state
    worker.journal.add(f"go {key}")

    assert case.result.get(timeout=20) is False, "its lock is not lost"
    assert (why.state, was_cancelled, state) == ("holds", False, states.STARTED)
    assert why.sentence.endswith("; a copy of its message waits until it has ended")
    wait_for(lambda: locks.get(key).idle, what="the end of the copy")


def test_a_holder_is_found_behind_hundreds(redis_url: str, namespace: str) -> None:
    desk, locks = Desk(redis_url, namespace), Locks(redis_url, namespace)
    for number in range(150):
        desk.fence(f"h{number}", limit=200, label=label_of("api.call", f"t{number}"))
    why = locks.why("t149")
    desk.close()

    assert (why.state, why.lock) == ("holds", "a")


def test_a_task_that_is_parked_while_the_workers_are_asked_is_parked(
    locks: Locks, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, task_id = Inspect.query_task, str(uuid.uuid4())

    def park_first(self: Inspect, *ids: Any) -> Any:
        held.park(task_id=task_id)
        return ask(self, *ids)

    monkeypatch.setattr(Inspect, "query_task", park_first)
    why = locks.why(task_id)

    assert why.state == "parked"
    assert f"[{task_id}] is parked: it has waited" in why.sentence
    assert [holder.task_id for holder in why.holders] == [held.id]


def test_a_task_that_is_parked_is_so_though_its_worker_still_has_it(
    worker: Worker, locks: Locks, key: str, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its parking and the end of its task in the worker."""
    task, task_id = worker.module.take, str(uuid.uuid4())

    def still_has_it(self: Inspect, *ids: Any) -> Any:
        held.park(task_id=task_id)
        info = {"id": task_id, "name": task.name, "args": [key], "kwargs": {}, "worker_pid": 1}
        return {worker.node: {task_id: ["active", info]}}

    monkeypatch.setattr(Inspect, "query_task", still_has_it)
    assert locks.why(task_id).state == "parked"


def test_why_says_that_a_worker_has_parked_a_task_in_another_place(
    worker: Worker, key: str, held: Any
) -> None:
    parked, of = held.park(), worker.module.app.conf
    here = Celery("here", set_as_current=False)
    here.conf.update({name: of[name] for name in ("broker_url", "broker_transport_options")})
    here.conf.update(relock_url=of.relock_url, relock_namespace=f"{worker.namespace}-not")
    with here:
        why = Locks(here).why(parked)

    assert (why.state, why.lock) == ("parked", key)
    assert f"the worker {worker.node} says of the task {parked} that it is parked" in why.sentence
    assert f"for the lock {key!r}" in why.sentence
    assert "compare relock_url and relock_namespace" in why.sentence


def test_why_says_that_a_parked_task_is_lost(
    worker: Worker, locks: Locks, held: Any, key: str
) -> None:
    parked = held.park()
    found = locks._look.parked(parked)
    assert found is not None
    # Redis has it no more, as if it had lost its data.
    engine_of(worker.module.app).parking.withdraw(found.waiter.execution_id)

    why = locks.why(parked)

    assert (why.state, why.lock) == ("lost", key), why
    assert f"had to wait for the lock '{key}' " in why.sentence
    assert "relock_url or relock_namespace was another one then" in why.sentence
    assert "send the task again" in why.sentence
    worker.module.app.backend.mark_as_revoked(parked)  # `held` waits for its end


def test_why_says_that_a_task_that_had_begun_is_lost(new_worker: Any) -> None:
    worker = new_worker("tests.admin.apps.desk", pool="solo")
    locks, task_id = Locks(worker.module.app), worker.module.hold.delay("a").id
    worker.journal.wait_for("inside a")
    worker.kill()
    assert locks.release("a")

    why = locks.why(task_id)

    assert why.state == "lost", why
    assert f"has begun in the worker {worker.node} (pid {worker.pid}), and " in why.sentence
    assert "send the task again" in why.sentence


@pytest.mark.parametrize("state", ["PROGRESS", states.STARTED])
def test_a_state_that_a_task_has_stored_itself_is_told(locks: Locks, state: str) -> None:
    task_id = str(uuid.uuid4())
    locks.app.backend.store_result(task_id, {"done": 3}, state)

    why = locks.why(task_id)

    assert why.state == "lost"
    assert why.sentence.startswith(
        f"the task {task_id} has the state {state}, and no worker that answers has it: "
    )


def test_why_tells_of_each_lock_that_a_task_waits_for(
    worker: Worker, locks: Locks, key: str, held: Any
) -> None:
    parked = held.park(worker.module.both)
    why = locks.why(parked)
    assert f"for the locks 'a {key}' and '{key}', first in the queue of 'a {key}'; " in why.sentence
    assert f"hold[{held.id}] has held '{key}' for " in why.sentence
    assert f"'a {key}' for" not in why.sentence


def test_why_names_who_is_first_at_a_lock_that_nobody_holds_of_several(
    worker: Worker, locks: Locks, key: str, held: Any
) -> None:
    pair, free = worker.module.pair, f"{key} free"
    first = pair.delay(key, free)
    wait_for(lambda: locks.get(free).parked == 1, what="the first to be parked")
    behind = pair.delay(f"{key} alone", free)
    wait_for(lambda: locks.get(free).parked == 2, what="the other to be parked")
    ahead, waits = locks.why(first.id).sentence, locks.why(behind.id).sentence
    held.go()
    for each in (first, behind):
        each.get(timeout=20)

    assert f"first in the queue of '{key}'; " in ahead
    assert f"hold[{held.id}] has held '{key}' for " in ahead
    assert f"'{free}' at this moment" not in ahead
    assert waits.endswith(
        f"for the locks '{key} alone' and '{free}', first in the queue of '{key} alone'; "
        f"nobody holds '{free}' at this moment, and {pair.name}[{first.id}], which is first, waits "
        f"for the locks '{key}' and '{free}'"
    )


def test_why_names_the_first_that_needs_another_lock_though_a_permit_is_free(
    worker: Worker, locks: Locks, key: str, held: Any
) -> None:
    several, several_and = worker.module.several, worker.module.several_and
    holder = several.delay(f"{key} several")
    worker.journal.wait_for(f"inside {key} several")
    first = several_and.delay(f"{key} several", key)
    wait_for(lambda: locks.get(f"{key} several").parked == 1, what="the first to be parked")
    behind = several.delay(f"{key} several")
    wait_for(lambda: locks.get(f"{key} several").parked == 2, what="the other to be parked")
    waits = locks.why(behind.id).sentence
    held.go()
    worker.journal.add(f"go {key} several")
    for each in (holder, first, behind):
        each.get(timeout=20)

    assert f"{several.name}[{holder.id}] has held it for " in waits
    assert waits.endswith(
        f", and {several_and.name}[{first.id}], which is first, waits for the locks '{key}' and "
        f"'{key} several'"
    )


def test_query_task_tells_who_holds_any_of_the_locks_that_a_parked_task_waits_for(
    worker: Worker, held: Any
) -> None:
    parked = held.park(worker.module.both)
    inspect = worker.module.app.control.inspect(timeout=5.0)

    def told() -> Any:
        (answer,) = inspect.query_task(parked).values()
        state, where = answer[parked]
        return where if state == "parked" else None  # until then its worker has it

    (holder,) = wait_for(told, 20, "its worker to let it go")["holders"]
    assert holder.startswith(f"{worker.module.hold.name}[{held.id}] ")


def test_who_waits_for_a_lock_that_is_kept_is_told_that_no_process_holds_it(
    worker: Worker, locks: Locks, key: str
) -> None:
    cooled, retried = worker.module.cools.delay(key), worker.module.again.delay(f"{key} again")
    assert cooled.get(timeout=20) == key

    def is_kept() -> bool:
        return any(each.kept for each in locks.get(f"{key} again").holders)

    wait_for(is_kept, 20, "the retry")
    sent = {name: worker.module.take.delay(name) for name in (key, f"{key} again")}
    for name in sent:
        wait_for(lambda name=name: locks.get(name).parked == 1, 20, f"the waiter for {name}")

    cools, again = locks.why(sent[key].id).sentence, locks.why(sent[f"{key} again"].id).sentence
    assert "first in its queue; it cools down for " in cools
    assert cools.endswith(f" more (lock_cooldown), after {worker.module.cools.name}[{cooled.id}]")
    assert f"again[{retried.id}] has held it for " in again
    kept = ", and it is kept for the next step, or the retry, of its workflow, for "
    assert re.search(rf"{kept}\d+\w* ?\w* more$", again)

    retried.revoke()
    for name, waiter in sent.items():
        locks.release(name)
        waiter.get(timeout=20)


def test_a_retry_that_runs_holds_its_lock_though_the_last_state_is_the_one_before(
    worker: Worker, locks: Locks, key: str
) -> None:
    retried, waits = worker.module.soon_again.delay(key), worker.module.again.delay(f"{key} 2")
    worker.journal.wait_for(f"inside {key}")
    wait_for(lambda: waits.state == states.RETRY, what="the retry that waits")

    running, waiting = locks.why(retried.id), locks.why(waits.id)

    assert (running.state, running.lock) == ("holds", key), running.sentence
    assert (waiting.state, waiting.lock) == ("retry", f"{key} 2")
    assert waiting.sentence.startswith(f"the task {waits.id} waits for its retry; ")
    worker.journal.add(f"go {key}")
    assert retried.get(timeout=20) is None
    waits.revoke()


def test_a_retry_is_told_what_is_kept_for_it_and_which_worker_has_its_message(
    worker: Worker, locks: Locks, key: str
) -> None:
    retried = worker.module.again.delay(key)
    has_come = "has its message until its ETA"
    wait_for(lambda: has_come in locks.why(retried.id).sentence, 30, "the message of the retry")

    why = locks.why(retried.id)

    begins = f"the task {retried.id} waits for its retry; the lock '{key}' is kept for it for "
    ends = rf"\d+m\d\ds more; the worker {worker.node} {has_come}"
    assert re.fullmatch(re.escape(begins) + ends, why.sentence), why.sentence
    assert why.state == "retry"
    assert (why.lock, [each.kept for each in why.holders]) == (key, [True])
    retried.revoke()
    locks.release(key)


def test_a_retry_that_no_worker_has_can_be_lost_and_its_lock_can_be_released(
    worker: Worker, locks: Locks, key: str
) -> None:
    """The broker crashed, say, and `why` of who holds the lock said that it will run again."""
    retried = worker.module.again_elsewhere.delay(key)
    wait_for(lambda: retried.state == states.RETRY, what="the retry")

    why = locks.why(retried.id)

    assert (why.state, why.lock) == ("retry", key)
    assert why.sentence.endswith(
        " more; no worker that answers has its message: it waits in the broker, or in a worker "
        "that does not tell of it, or is lost"
    )
    assert [each.task_id for each in locks.release(why.lock)] == [retried.id]


def test_a_task_that_celery_has_cancelled_does_not_wait_for_a_retry_of_its_body(
    worker: Worker, locks: Locks
) -> None:
    lost, error = str(uuid.uuid4()), Retry(message="cancelled by Celery")
    worker.module.app.backend.mark_as_retry(lost, error)  # as `Request.cancel` does

    why = locks.why(lost)

    assert why.state == "retry"
    assert why.sentence.startswith(
        f"the task {lost} was cancelled by Celery (a shutdown, or a lost connection to the "
        "broker); no worker that answers has its message: "
    )


@pytest.mark.parametrize("answers", [True, False], ids=["its worker answers", "it does not"])
def test_a_revoked_task_that_runs_has_not_ended(
    locks: Locks, key: str, held: Any, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """A worker that does not have it, as here this process, stores REVOKED (Celery 5.6.2)."""
    if not answers:
        monkeypatch.setattr(Inspect, "query_task", lambda *_: None)
    locks.app.backend.store_result(held.id, TaskRevokedError("revoked"), states.REVOKED)

    why = locks.why(held.id)

    assert (why.state, why.lock) == ("holds", key), why.sentence
    held.go()
    wait_for(lambda: locks.why(held.id).state == "ended", what="its end")


def test_a_task_that_ends_while_its_worker_is_asked_has_ended_and_did_not_run_without_a_lock(
    worker: Worker, locks: Locks, key: str, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have a second to answer: then the one that said that it runs the task is done."""
    ask = Inspect.query_task

    def and_end(self: Inspect, *ids: Any) -> Any:
        told = ask(self, *ids)
        held.go()
        held.result.get(timeout=20)
        return told

    monkeypatch.setattr(Inspect, "query_task", and_end)
    why = locks.why(held.id)
    assert (why.state, why.sentence) == ("ended", f"the task {held.id} has ended: SUCCESS")


def test_a_retry_is_told_its_reason_and_its_place_in_the_order(
    worker: Worker, locks: Locks, key: str
) -> None:
    retried = worker.module.again_in_order.delay(key)
    wait_for(lambda: retried.state == states.RETRY, what="the retry that waits")

    why = locks.why(retried.id)

    assert why.state == "retry"
    assert why.sentence.startswith(
        f"the task {retried.id} waits for its retry: no luck; it has its place in the order of "
        f"'{key}', first in its queue"
    )
    retried.revoke()
    locks.release(LINE + key)


def test_an_ordered_call_whose_message_is_in_the_broker_is_awaited(
    worker: Worker, locks: Locks, key: str
) -> None:
    lost, behind = (
        worker.module.in_order.apply_async((key, "call"), queue=queue)
        for queue in ("of-no-worker", worker.module.app.conf.task_default_queue)
    )
    wait_for(lambda: locks.why(behind.id).state == "parked", what="the call behind it")

    why = locks.why(lost.id)

    assert (why.state, why.lock, why.ahead) == ("awaited", LINE + key, 0), why
    assert f"in_order[{lost.id}] took its place in the order of '{key}' " in why.sentence
    assert locks.cancel(behind.id)
    assert locks.cancel(lost.id)


def test_of_an_ordered_call_that_is_due_later_it_is_told_when(
    worker: Worker, locks: Locks, key: str
) -> None:
    later = worker.module.in_order.apply_async((key, "call"), queue="of-no-worker", countdown=600)

    why = locks.why(later.id)

    assert why.state == "awaited"
    due = rf"in_order\[{later.id}\] is due in the order of '{key}' 9m\d\ds from now, first "
    assert re.search(due, why.sentence)
    assert locks.cancel(later.id)


def test_a_call_that_has_come_and_waits_for_its_lock_is_not_said_to_be_awaited(
    worker: Worker, locks: Locks, key: str, held: Any
) -> None:
    first = held.park(worker.module.in_order, kwargs={"which": "call"})
    behind = worker.module.in_order.delay(key, "call")
    wait_for(lambda: locks.why(behind.id).state == "parked", what="the call behind it")

    said = locks.why(behind.id).sentence

    assert f"in the order of '{key}', with 1 ahead of it; " in said
    assert said.endswith(f"in_order[{first}], which is first, waits for the lock '{key}'")
    assert locks.cancel(behind.id)


def test_a_cancelled_call_whose_message_is_awaited_leaves_the_order_and_is_revoked(
    worker: Worker, locks: Locks, key: str, forced: Any
) -> None:
    lost = worker.module.in_order.apply_async((key, "call"), queue=f"late-{key}")
    worker.module.in_order.delay(key, "second")
    wait_for(lambda: locks.get(LINE + key).parked == 1, 20, "the second")

    assert locks.cancel(lost.id)

    worker.journal.wait_for(f"second {key}", 20)
    assert locks.cancel(lost.id) is False, "its place is gone"
    worker.journal.add(f"go {key}")
    assert forced == [("cancel", (key,), lost.id, "alice", "desk 3")]
    worker.module.app.control.add_consumer(f"late-{key}", reply=True, timeout=20, limit=1)
    wait_for(lambda: lost.state == states.REVOKED, 20, "its message to be discarded")
    worker.module.app.control.cancel_consumer(f"late-{key}")


def test_a_cancelled_call_that_reaches_a_worker_of_later_does_not_run(
    worker: Worker, locks: Locks, key: str, redis_url: str
) -> None:
    """Which has not heard that it was revoked."""
    lost = worker.module.in_order_again.apply_async((key, "call"), queue=f"late-{key}")

    assert locks.cancel(lost.id)

    assert lost.state == states.REVOKED
    queue, namespace = ("-Q", f"late-{key}"), worker.namespace
    later = Worker("tests.admin.apps.desk", redis_url, namespace, pool="threads", arguments=queue)
    try:
        later.wait_for_log(rf"in_order_again\[{lost.id}\] .*late copy")
        assert f"call {key}" not in worker.journal.names()
        assert lost.state == states.REVOKED
    finally:
        later.close()


@pytest.mark.parametrize(
    ("has_remote_control", "why"), [(True, "Error 111"), (False, "they hear no remote control")]
)
def test_a_call_whose_workers_cannot_be_told_is_cancelled_all_the_same(
    locks: Locks,
    worker: Worker,
    key: str,
    caplog: pytest.LogCaptureFixture,
    has_remote_control: bool,
    why: str,
) -> None:
    lost = worker.module.in_order.apply_async((key, "call"), queue=f"late-{key}")
    away = f"redis://127.0.0.1:{free_port()}"
    with Celery("away", broker=away, set_as_current=False) as app:
        app.conf.update(
            worker_enable_remote_control=has_remote_control,
            relock_url=worker.module.app.conf.relock_url,
            relock_namespace=worker.namespace,
            broker_transport_options={"retry_policy": {"max_retries": 0}},
            task_publish_retry_policy={"max_retries": 0},
        )
        assert Locks(app).cancel(lost.id)
    assert f"Cannot tell the workers that {lost.id} is revoked: {why}" in caplog.text
    assert locks.cancel(lost.id) is False


def test_a_broker_that_is_away_is_asked_no_longer_than_it_takes_to_see_that(
    caplog: pytest.LogCaptureFixture, namespace: str, redis_url: str
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as refuses,
        Celery("away", set_as_current=False) as app,
    ):
        came: list[socket.socket] = []

        def refuse() -> None:
            with suppress(OSError):  # the test has ended
                while True:
                    came.append(refuses.accept()[0])
                    came[-1].close()

        threading.Thread(target=refuse, daemon=True).start()
        app.conf.broker_url = f"redis://127.0.0.1:{refuses.getsockname()[1]}/0"
        app.conf.update(relock_url=redis_url, relock_namespace=namespace)
        assert Locks(app).why("unknown").state == "unknown"
        refuses.shutdown(socket.SHUT_RDWR)
    assert "Cannot ask the workers" in caplog.text
    assert len(came) == 2  # left to itself, Celery comes three times, in six seconds


def test_the_calls_of_an_order_are_counted_when_their_message_waits_for_its_turn(
    worker: Worker, locks: Locks, key: str
) -> None:
    def counted() -> dict[str, float]:
        found = locks.stats()
        return {each: getattr(found, each) for each in ("locks", "holders", "waiting", "parked")}

    before = counted()
    calls = [
        worker.module.in_order.apply_async((key, "call"), queue=f"late-{key}") for _ in range(3)
    ]
    assert counted() == before
    behind = worker.module.in_order.delay(key, "second")
    wait_for(lambda: locks.why(behind.id).state == "parked", what="the call behind them")
    assert counted() == {**before, "waiting": before["waiting"] + 1, "parked": before["parked"] + 1}
    for each in calls:
        assert locks.cancel(each.id)
    assert behind.get(timeout=20) is None
    runs = worker.module.in_order_again.delay(key, "first")
    worker.journal.wait_for(f"first {key}")
    assert counted() == {**before, "locks": before["locks"] + 1, "holders": before["holders"] + 1}
    worker.journal.add(f"go {key}")
    runs.get(timeout=20)


def test_a_call_that_runs_in_its_order_is_not_cancelled(
    worker: Worker, locks: Locks, key: str
) -> None:
    runs = worker.module.in_order_again.delay(key, "first")
    worker.journal.wait_for(f"first {key}")

    assert locks.cancel(runs.id) is False

    worker.journal.add(f"go {key}")
    assert runs.get(timeout=20) is None


def test_of_a_lock_in_the_body_of_a_task_the_task_is_told(
    worker: Worker, locks: Locks, key: str
) -> None:
    sent = worker.module.by_hand.delay(key)
    worker.journal.wait_for(f"inside {key}")
    (holder,) = locks.get(key).holders
    assert (holder.task, holder.task_id) == ("Lock", sent.id)
    assert locks.why(sent.id).sentence.startswith(f"Lock[{sent.id}] has held the lock '{key}' for")
    assert [each.task_id for each in locks.release(key, sent.id)] == [sent.id]
    worker.journal.add(f"go {key}")
    sent.get(timeout=20, propagate=False)


def test_an_id_with_brackets_is_told_whole(worker: Worker, locks: Locks, key: str) -> None:
    sent = worker.module.hold.apply_async((key,), task_id=f"hold[{key}]")
    worker.journal.wait_for(f"inside {key}")
    assert locks.why(sent.id).state == "holds"
    assert [each.task_id for each in locks.release(key, sent.id)] == [f"hold[{key}]"]
    worker.journal.add(f"go {key}")
    sent.get(timeout=20)


def test_why_finds_the_lock_by_the_prefix_and_the_options_of_the_call(
    worker: Worker, locks: Locks, key: str
) -> None:
    sent = worker.module.hold.apply_async((key,), relock_prefix="acme/")
    worker.journal.wait_for(f"inside {key}")
    why = locks.why(sent.id)
    assert (why.state, why.lock) == ("holds", f"acme/{key}")
    assert [each.task_id for each in locks.release(f"acme/{key}", sent.id)] == [sent.id]
    worker.wait_for_log(f"lock 'acme/{key}' lost", 20)
    worker.journal.add(f"go {key}")
    assert sent.get(timeout=20) is True


def test_without_an_app_a_task_is_found_by_what_is_in_redis(
    worker: Worker, held: Any, key: str, redis_url: str
) -> None:
    parked = held.park()
    locks = Locks(redis_url, namespace=worker.namespace)

    assert (locks.why(held.id).state, locks.why(parked).state) == ("holds", "parked")
    assert locks.why("no-such-task").state == "unknown"
    with pytest.raises(RelockError, match="needs its app"):
        locks.cancel(parked)
    assert locks.get(key).parked == 1


def test_a_task_whose_worker_does_not_answer_while_others_do_is_found_by_what_is_in_redis(
    worker: Worker, locks: Locks, key: str
) -> None:
    """A worker of the solo pool answers nobody while it runs a task."""
    conf, task_id = worker.module.app.conf, str(uuid.uuid4())
    desk = Desk(conf.relock_url, conf.relock_namespace)
    try:
        desk.fence("r1", names=(key,), label=label_of("my.task", task_id))
        assert locks.why(task_id).state == "holds"
    finally:
        desk.release("r1", names=(key,))
        desk.close()


def test_a_plain_step_is_told_to_hold_the_lock_of_its_workflow(
    worker: Worker, locks: Locks, key: str
) -> None:
    last = worker.module.workflow(key).delay()
    worker.journal.wait_for(f"inside {key}")
    why = locks.why(last.parent.id)
    worker.journal.add(f"go {key}")
    worker.journal.add(f"go second {key}")
    last.get(timeout=20)
    assert (why.state, why.lock) == ("holds", key)


def test_each_step_tells_that_its_workflow_is_parked_and_what_to_cancel(
    worker: Worker, locks: Locks, held: Any, key: str
) -> None:
    last = worker.module.workflow(key).delay()
    wait_for(lambda: locks.get(key).parked, what="the workflow to be parked")
    first, enter = last.parent, last.parent.parent
    for step in (first, last):
        why = locks.why(step.id)
        assert (why.task_id, why.state, why.lock) == (step.id, "parked", key)
        assert f"celery_relock.enter[{enter.id}] is parked" in why.sentence
    assert locks.why(key).state == "unknown", "it is an argument of each step"
    assert locks.cancel(enter.id)


def test_of_a_task_with_a_dedup_marker_the_lock_is_told(
    worker: Worker, locks: Locks, key: str
) -> None:
    """Also where all locks are looked at."""
    conf, task_id = worker.module.app.conf, str(uuid.uuid4())
    desk = Desk(conf.relock_url, conf.relock_namespace)
    names = (key, f"{MARKER}task\t{key}", f"{LINE}{key}")
    try:
        for run, name in zip(("r1", "r2", "r3"), names, strict=True):
            desk.fence(run, names=(name,), label=label_of("my.task", task_id))
        assert locks.why(task_id).lock == key
        desk.release("r1", names=(key,))
        assert f"has its turn in the order of '{key}', in process " in locks.why(task_id).sentence
        desk.release("r3", names=names[2:])
        assert locks.why(task_id).state == "unknown"
    finally:
        desk.release("r2", names=names[1:2])
        desk.close()


def test_of_a_call_whose_message_is_lost_the_marker_is_told(
    worker: Worker, locks: Locks, key: str
) -> None:
    lost = worker.module.once.apply_async((key,), queue="nowhere")
    try:
        why = locks.why(lost.id)
    finally:
        worker.module.once.unmark(key)

    assert why.state == "unknown"
    assert "or was sent elsewhere, or was lost; its call was marked " in why.sentence
    name = f"{MARKER}{worker.module.once.name}\t{key}"
    assert f" ago by {name!r}, which keeps equal calls from being sent for " in why.sentence
    assert "never sent" not in why.sentence


def test_who_may_not_look_at_all_locks_is_told_what_else_is_known(own_redis: Any) -> None:
    client = own_redis().client()
    url = "redis://small:pw@{host}:{port}/0".format(**client.get_connection_kwargs())
    client.acl_setuser("small", True, passwords=["+pw"], categories=["+@all"], commands=["-scan"],
                       keys=["*"], channels=["*"])  # fmt: skip
    with Lock(url, "a"):
        assert Locks(url).why("no-such-task").state == "unknown"


def test_a_result_that_could_not_be_asked_for_is_told_apart_from_none(
    redis_url: str, namespace: str
) -> None:
    away = f"redis://127.0.0.1:{free_port()}"
    app = Celery("away", broker="memory://", backend=away, set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace)
    app.conf.update(result_backend_transport_options={"retry_policy": {"max_retries": 0}})
    with app:
        why = Locks(app).why("a-task")

    assert why.state == "unknown"
    assert "no result" not in why.sentence
    assert "and the result backend could not be asked (" in why.sentence
    assert "It might have ended, or wait in the broker" in why.sentence


def test_an_app_without_a_result_backend_has_no_result(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery("bare", broker="memory://", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace)
    with app:
        why = Locks(app).why("a-task")

    assert why.state == "unknown"
    assert "and no result of it was found. It might have ended, or wait in the" in why.sentence
    assert "Cannot read the state" not in caplog.text


def test_a_forced_release_is_heard_by_the_holder_and_the_next_acquires(
    worker: Worker, locks: Locks, key: str, held: Any, forced: Any, caplog: Any
) -> None:
    parked = held.park()

    with caplog.at_level(logging.WARNING, "celery_relock"):
        assert [each.task_id for each in locks.release(key)] == [held.id]
    worker.journal.wait_for(f"took {key}")
    worker.wait_for_log(f"lock '{key}' lost", 20)  # its first renewal is 10 s away
    why = locks.why(held.id)
    held.go()

    assert why.state == "runs"
    assert why.sentence.endswith(f") and does not hold its lock {key!r}")
    assert held.result.get(timeout=30) is True, "the holder knows that its lock is lost"
    assert forced == [("release", (key,), held.id, "alice", "desk 3")]
    (record,) = [each for each in caplog.records if "by force" in each.message]
    assert (record.lock_event, record.lock_action, record.lock_names) == (
        "forced",
        "release",
        [key],
    )
    line = record.message
    assert f"'{key}': released by force by alice from desk 3" in line
    assert held.id in line
    wait_for(lambda: locks.why(parked).state == "ended", what="the parked execution to end")


def test_a_forced_release_grants_the_lock_to_the_next_in_its_order(
    worker: Worker, locks: Locks, key: str, forced: Any
) -> None:
    first = worker.module.in_order.delay(key, "first")
    worker.journal.wait_for(f"first {key}")
    worker.module.in_order.delay(key, "second")
    wait_for(lambda: locks.get(LINE + key).parked == 1, 20, "the second")

    assert [each.task_id for each in locks.release(key)] == [first.id]

    worker.journal.wait_for(f"second {key}", 20)
    worker.journal.add(f"go {key}")
    assert forced == [("release", (key,), first.id, "alice", "desk 3")]
    assert first.get(timeout=20) is None


@pytest.mark.parametrize("named", [False, True])
def test_by_force_an_order_goes_on_without_the_message_that_it_waits_for(
    worker: Worker, locks: Locks, key: str, forced: Any, caplog: Any, named: bool
) -> None:
    lost = worker.module.in_order.apply_async((key, "late"), queue="of-no-worker")
    second = worker.module.in_order.delay(key, "second")
    wait_for(lambda: locks.get(LINE + key).parked == 1, 20, "the second")

    assert locks.release(key, second.id) == ()
    with caplog.at_level(logging.WARNING, "celery_relock"):
        released = locks.release(key, lost.id if named else None)

    assert [each.task_id for each in released] == [lost.id]
    worker.journal.wait_for(f"second {key}", 20)
    worker.journal.add(f"go {key}")
    assert forced == [("release", (key,), lost.id, "alice", "desk 3")]
    of = f"{worker.module.in_order.name}[{lost.id}]"
    said = f"lock '{key}': its order goes on, by force by alice from desk 3, without the message of"
    assert f"{said} {of}" in caplog.messages
    assert second.get(timeout=20) is None


def test_only_the_hold_of_the_task_that_is_named_is_released(
    locks: Locks, key: str, held: Any
) -> None:
    assert locks.release(key, "another") == ()
    assert locks.get(key).held == 1
    assert [each.task_id for each in locks.release(key, held.id)] == [held.id]
    assert locks.get(key).held == 0


def test_a_cancelled_execution_leaves_the_queue_and_is_revoked(
    worker: Worker, locks: Locks, key: str, held: Any, forced: Any, monitor: Monitor
) -> None:
    cancelled, next_one = held.park(link=worker.module.linked.s()), held.park()

    assert locks.cancel(cancelled) is True
    assert locks.cancel(cancelled) is False

    assert [each.task_id for each in locks.get(key).waiters] == [next_one]
    assert worker.module.app.AsyncResult(cancelled).state == states.REVOKED
    assert forced == [("cancel", (key,), cancelled, "alice", "desk 3")]
    told = monitor.wait(cancelled, "lock-forced")
    facts = [told[name] for name in ("locks", "action", "by", "origin")]
    assert facts == [[key], "cancel", "alice", "desk 3"]
    monitor.wait(cancelled, "task-revoked")
    why = locks.why(cancelled)
    assert (why.state, "REVOKED" in why.sentence) == ("ended", True)
    held.go()
    worker.journal.wait_for(f"took {key}")
    assert worker.journal.names().count(f"took {key}") == 1
    assert not worker.journal.events("linked", result=None)


@pytest.mark.parametrize("how", ["cancel", "revoke"])
def test_a_canvas_ends_as_after_a_revoke(
    worker: Worker, locks: Locks, key: str, held: Any, how: str
) -> None:
    """The second row is what Celery's own revoke does: the first must not differ from it."""
    module = worker.module
    body = chord(group(module.take.si(key), module.linked.si(1)))(module.joined.s())
    steps = chain(module.take.si(key), module.linked.si(2)).delay()
    wait_for(lambda: locks.get(key).parked == 2, what="both to be parked")

    for waiter in locks.get(key).waiters:
        if how == "cancel":
            assert locks.cancel(waiter.task_id)
        else:
            module.app.control.revoke(waiter.task_id)

    with pytest.raises(Exception, match=r"revoked|REVOKED"):
        body.get(timeout=30)
    wait_for(lambda: body.state == states.FAILURE, what="the body's end")
    wait_for(lambda: steps.parent.state == states.REVOKED, what="the first step's end")
    assert steps.state == states.PENDING
    wait_for(lambda: locks.get(key).waiting == 0, what="the queue to be empty")


def test_a_burst_of_calls_is_told_as_one_and_leaves_nothing_when_it_is_cancelled(
    worker: Worker, locks: Locks, key: str
) -> None:
    before = locks.stats()
    later = worker.module.later.delay(key)
    name = f"debounce\t{worker.module.later.name}\t{key}"

    (pause,) = locks.get(name).holders
    assert (pause.pause, pause.kept) == (True, False)
    why = locks.why(later.id)
    assert (why.state, why.lock) == ("parked", name)
    assert "is a burst of calls" in why.sentence
    assert "from now if no more calls come" in why.sentence
    after = locks.stats()
    assert after.bursts == before.bursts + 1
    assert (after.locks, after.parked) == (before.locks, before.parked)

    assert locks.cancel(later.id)
    assert later.state == states.REVOKED
    assert locks.get(name).idle


def test_the_pause_of_a_later_burst_is_not_that_of_one_that_is_over(
    worker: Worker, locks: Locks, key: str
) -> None:
    """The broker is away, and meanwhile calls come."""
    backend, name = locks._engine.backend, f"debounce\tmy.task\t{key}"
    for number, ended in enumerate((True, False)):
        task_id = f"{key}-{number}"
        call = Debounce(task_id, None, False, 600.0, 6000.0, task_id, label_of("my.task", task_id))
        backend.debounce(name, call, ParkRequest("text", "nowhere", ids.short(task_id)))
        if ended:
            backend.force_release(name)
            backend.resume("nowhere", "n", ())

    over, pauses = (locks.why(f"{key}-{number}").sentence for number in range(2))

    assert "no more calls came" in over
    assert "from now if no more calls come" in pauses
    for number in range(2):
        assert locks._engine.parking.withdraw(f"{key}-{number}")


def test_a_burst_that_no_worker_takes_says_which_worker_it_needs(
    worker: Worker, locks: Locks, key: str
) -> None:
    backend, task_id = locks._engine.backend, uuid.uuid4().hex
    name = f"debounce\tmy.task\t{key}"
    call = Debounce("c", None, False, 600.0, 6000.0, task_id, label_of("my.task", task_id))
    backend.debounce(
        name, call, ParkRequest("text", "a home that no worker has", ids.short(task_id))
    )
    backend.force_release(name)

    sentence = locks.why(task_id).sentence

    assert "a worker whose app has the caller's name" in sentence
    assert locks._engine.parking.withdraw("c")


def test_a_cancelled_call_can_be_sent_again(
    worker: Worker, locks: Locks, key: str, held: Any
) -> None:
    first = held.park(worker.module.once)
    markers = [each.name for each in locks.find(f"*{key}", markers=True)]
    assert markers == [f"dedup\ttests.admin.apps.desk.once\t{key}"]
    assert key not in [each.name for each in locks.find("*", markers=True)]

    assert locks.cancel(first)

    assert list(locks.find(f"*{key}", markers=True)) == []
    assert held.park(worker.module.once) != first


def test_an_execution_whose_turn_has_come_is_cancelled_once_and_for_all(
    worker: Worker, locks: Locks, key: str, redis_url: str
) -> None:
    """Its message is at the broker already: whoever receives it finds that it has ended."""
    module = worker.module
    with Lock(redis_url, key, namespace=worker.namespace):
        sent = module.take.delay(key)
        wait_for(lambda: locks.get(key).parked, what="the run to be parked")
    # Either it is quick and has run, or it is cancelled; never both, and never neither.
    was_cancelled = locks.cancel(sent.id)
    sent.get(timeout=30, propagate=False)

    assert sent.state == (states.REVOKED if was_cancelled else states.SUCCESS)
    assert (f"took {key}" in worker.journal.names()) is not was_cancelled


@pytest.mark.parametrize("ignore_result", [False, True])
def test_a_cancelled_execution_whose_message_is_with_a_worker_already_never_runs(
    ignore_result: bool, worker: Worker, locks: Locks, key: str, redis_url: str
) -> None:
    module = worker.module
    ask = module.app.control.inspect(timeout=1.0).query_task

    def states_in_workers(task_id: str) -> list[str]:
        return [told[task_id][0] for told in (ask(task_id) or {}).values() if task_id in told]

    with Lock(redis_url, key, namespace=worker.namespace):
        sent = module.take.apply_async((key,), ignore_result=ignore_result)
        wait_for(lambda: locks.get(key).parked, what="the run to be parked")
        # Every slot is taken, and one more task waits for a slot.
        others = [module.bare.delay(f"{key} {number}") for number in range(6)]
        for number in range(6):
            worker.journal.wait_for(f"inside {key} {number}")
        others.append(module.bare.delay(f"{key} 6"))
        wait_for(lambda: states_in_workers(others[6].id) == ["reserved"], what="the seventh")
    wait_until_requeued(worker)
    # As a task has ended the message comes to the worker, and no further: it is the seventh's turn.
    worker.journal.add(f"go {key} 0")
    wait_for(lambda: states_in_workers(sent.id) == ["reserved"], what="its arrival")
    assert locks.cancel(sent.id)
    if ignore_result:  # no state says so to a worker
        worker.wait_for_log(rf"flagged as revoked: {sent.id}")
    for number in range(1, 7):
        worker.journal.add(f"go {key} {number}")
    for each in others:
        each.get(timeout=20)
    wait_for(lambda: not states_in_workers(sent.id), what="the end of the message")
    assert f"took {key}" not in worker.journal.names()
    assert locks.get(key).idle
    if not ignore_result:
        assert sent.state == states.REVOKED


def test_the_workers_are_told_of_a_cancelled_execution_whose_message_they_may_have(
    worker: Worker, locks: Locks, key: str, held: Any, client: Any
) -> None:
    """It was handed out a while ago, and waits in the broker behind others."""
    parked = held.park(ignore_result=True)
    (place,) = locks.get(key).waiters
    at = locks._look.inspection.own_keys.of_lock("w", key)
    record = json.loads(client.hget(at, place.execution_id))
    client.hset(at, place.execution_id, json.dumps({**record, "sent": 1, "back": 1}))

    assert locks.cancel(parked)

    worker.wait_for_log(rf"flagged as revoked: {parked}")


def test_a_task_is_cancelled_though_a_module_of_its_app_cannot_be_imported(
    locks: Locks, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parked = held.park()

    def fail() -> None:
        raise ModuleNotFoundError("No module named 'reports'")

    monkeypatch.setattr(locks.app.loader, "import_default_modules", fail)
    assert locks.cancel(parked)
    assert locks.why(parked).sentence.startswith(f"the task {parked} has ended: REVOKED")


def test_an_execution_of_a_task_that_the_app_does_not_have_is_left_alone(
    worker: Worker, locks: Locks, key: str, held: Any
) -> None:
    parked = held.park()
    task = locks.app._tasks.pop("tests.admin.apps.desk.take")
    try:
        with pytest.raises(RelockError, match=r"which this app .* does not have"):
            locks.cancel(parked)
    finally:
        locks.app._tasks[task.name] = task
    assert locks.get(key).parked == 1


def test_locks_may_change_while_they_are_looked_at(
    worker: Worker, locks: Locks, redis_url: str
) -> None:
    namespace, stopped = worker.namespace, threading.Event()

    def change(number: int) -> None:
        while not stopped.is_set():
            with Lock(redis_url, f"busy:{number % 2}", namespace=namespace):
                pass

    threads = [threading.Thread(target=change, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        seen: set[tuple[int, int]] = set()
        until = time.monotonic() + 20
        while len(seen) < 3 and time.monotonic() < until:
            lock = locks.get("busy:0")
            seen.add((lock.held, lock.waiting))
            assert all(each.name.startswith("busy:") for each in locks.find("busy:*"))
            assert lock.held <= 1
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert len(seen) >= 2, "it did change"


def test_of_ten_thousand_waiters_the_first_are_shown_and_all_are_counted(
    redis_url: str, namespace: str, client: Any, trips: list[str]
) -> None:
    desk = Desk(redis_url, namespace)
    try:
        desk.fence("e", names=("a",))
        desk.park("w0", names=("a",), task="t0")
        record, queue = client.hget(desk.keys.of_lock("w", "a"), "w0"), desk.keys.of_lock("q", "a")
        more = [f"w{number}" for number in range(1, 10_000)]
        client.hset(desk.keys.of_lock("w", "a"), mapping=dict.fromkeys(more, record))
        client.zadd(queue, {name: 2e15 + at for at, name in enumerate(more)})
        locks = Locks(redis_url, namespace)
        client.config_resetstat()
        trips.clear()

        lock = locks.get("a")

        assert (lock.waiting, len(lock.waiters)) == (10_000, 100)
        assert lock.waiters[99].execution_id == "w99"
        assert len(trips) <= 5
        assert client.info("commandstats")["cmdstat_hget"]["calls"] < 300
        assert [each.waiting for each in locks.find()] == [10_000]
        assert locks.stats().waiting == 10_000
    finally:
        desk.close()


def test_looking_costs_a_scan_and_a_script_for_fifty_locks(
    redis_url: str, namespace: str, client: Any, trips: list[str]
) -> None:
    """The short form of `python -m benchmarks.inspecting`."""
    desk = Desk(redis_url, namespace)
    try:
        for number in range(120):
            desk.fence(f"e{number}", names=(f"n{number}",))
        locks = Locks(redis_url, namespace)
        list(locks.find(limit=1))
        keys = client.dbsize()
        trips.clear()

        assert len(list(locks.find())) == 120

        scans = trips.count("SCAN")
        assert scans <= keys / 1000 + 3
        assert trips.count("EVALSHA") <= 120 / 50 + 1
        assert len(trips) <= scans + 4
    finally:
        desk.close()


def test_a_task_is_released_by_name_without_a_look_at_all_who_wait(own_redis: Any) -> None:
    server = own_redis()
    desk, locks = Desk(server.url, "shop"), Locks(server.url, "shop")
    desk.fence("h", label="pay[holder] web:1")
    for number in range(300):
        desk.park(f"w{number}")
    desk.client.config_resetstat()

    assert [each.execution_id for each in locks.release("a", "holder")] == ["h"]

    reads = desk.client.info("commandstats")["cmdstat_hget"]["calls"]
    assert reads < 30
    desk.close()


def test_a_hold_behind_those_that_cool_down_is_the_oldest(redis_url: str, namespace: str) -> None:
    app = Celery("cools", broker="memory://", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace)
    locks, seen = Locks(app), []
    options = {"lock_key": "api", "lock_limit": 3, "lock_cooldown": 600}

    @app.task(base=LockedTask, shared=False, **options)
    def call(last: bool) -> None:
        if last:
            wait_for(lambda: locks.stats().oldest_hold > 0, what="a millisecond to pass")
            seen.append(locks.stats())
            seen.extend(locks.find())

    for last in (False, False, True):
        call.apply((last,)).get()

    stats, lock = seen
    assert (stats.holders, stats.oldest_hold_lock) == (3, "api")
    assert stats.oldest_hold < lock.at - lock.holders[0].since, "no cooldown is a hold"
    assert len(lock.holders) == 1
    assert locks.stats().oldest_hold == 0, "all cool down"
    app.close()


def test_a_lock_with_an_index_is_released_of_all_its_holders(
    redis_url: str, namespace: str
) -> None:
    desk, locks = Desk(redis_url, namespace), Locks(redis_url, namespace)
    for number in range(40):
        desk.fence(f"h{number}", limit=100)
    assert len(locks.release("a")) == 40
    assert locks.get("a").idle
    desk.close()


def test_permits_are_released_however_many_hold_the_lock_before_them(
    redis_url: str, namespace: str
) -> None:
    """By their tokens, as numbers or as text."""
    desk, locks = Desk(redis_url, namespace), Locks(redis_url, namespace)
    for number in range(120):
        desk.fence(f"h{number}", limit=200)
    tokens = [each.token for each in locks.get("a", most=200).holders]

    released = locks.release("a", permits=[tokens[0], str(tokens[-1])])

    assert [each.token for each in released] == [tokens[0], tokens[-1]]
    assert locks.get("a").held == 118
    desk.close()


def test_after_a_server_was_emptied_the_locks_of_processes_that_go_on_are_told(
    own_redis: Any,
) -> None:
    server = own_redis()
    with Lock(server.url, "first", namespace="shop"):
        pass
    server.client().flushall()
    with Lock(server.url, "a", namespace="shop"):
        locks = Locks(server.url, namespace="shop")
        assert locks.get("a").held == 1
        assert [each.name for each in locks.find()] == ["a"]
        assert locks.stats().held == 1


def test_bad_input_gets_a_clear_answer(redis_url: str, namespace: str, client: Any) -> None:
    desk = Desk(redis_url, namespace)
    locks = Locks(redis_url, namespace)
    assert list(locks.find()) == []
    assert locks.stats().locks == 0
    assert client.keys(f"{namespace}:*") == [], "looking begins no namespace"
    desk.fence("e", names=("a",))
    client.set(desk.keys.lock("theirs"), "theirs")
    client.set(desk.keys.lock("x").encode() + b"\xff", "theirs")

    assert locks.get("theirs").foreign
    with pytest.raises(LockConfigError, match="in use for something else; nothing was changed"):
        locks.release("theirs")
    assert {each.name: each.foreign for each in locks.find()} == {
        "a": False,
        "theirs": True,
        "x\\xff": True,
    }
    assert locks.stats().foreign == 2
    with pytest.raises(LockConfigError, match=r"limit=-1: use a number from 0, or None for all"):
        locks.find(limit=-1)
    assert locks.get("\x1b[2J").idle
    with Lock(redis_url, "script", namespace=namespace) as lock:
        # Who holds it outside of a task has no task id: an unset variable must not match.
        with pytest.raises(LockConfigError, match="task_id is empty"):
            locks.release("script", "")
        assert not lock.lost
        assert "othing is known" in locks.why("").sentence
    desk.close()


def test_the_namespace_of_an_app_is_its_own(redis_url: str) -> None:
    app = Celery("shop", broker=redis_url, set_as_current=False)
    with pytest.raises(LockConfigError, match="namespace='staging' cannot be given with an app"):
        Locks(app, "staging")
    app.close()


def test_an_app_without_locks_is_told_why_there_are_none() -> None:
    app = Celery("off", broker="memory://", set_as_current=False)
    app.conf.relock_enabled = False
    with pytest.raises(LockConfigError, match="relock_enabled=False there are no locks outside"):
        Locks(app)
    app.close()


def test_a_redis_that_is_away_or_refuses_is_told(own_redis: Any) -> None:
    with pytest.raises(LockUnavailable, match="cannot be reached"):
        Locks(f"redis://127.0.0.1:{free_port()}").get("a")
    server = own_redis()
    rules = ("~*", "&*", "+@all", "-scan")
    server.client().execute_command("ACL", "SETUSER", "few", "on", ">pw", *rules)
    few = Locks(f"redis://few:pw@127.0.0.1:{server.port}")
    with Lock(server.url, "a"):
        assert few.get("a").held == 1
        with pytest.raises(LockConfigError, match="this Redis user lacks"):
            list(few.find())


def test_who_acts_is_told_by_default(redis_url: str) -> None:
    locks = Locks(redis_url)

    assert locks.by
    assert locks.origin == f"{socket.gethostname()}:{os.getpid()}"
