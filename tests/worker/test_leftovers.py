"""What a revoked message leaves, while Redis cannot be reached."""

from __future__ import annotations

import threading

from celery import Celery
from celery.app.task import Context
from celery.signals import task_revoked

import celery_relock.worker.leftovers  # noqa: F401  # its receiver
from celery_relock import LockedTask, declaration
from celery_relock.dedup import marker
from celery_relock.engine.protocol import KEPT, PlaceRequest
from celery_relock.worker import consumer, message
from celery_relock.worker.message import is_lockable
from tests.support import wait_for
from tests.support.desk import Desk


def test_what_cannot_be_cleared_away_is_so_when_redis_is_back(caplog, own_redis):
    server = own_redis()
    app = Celery("revoked", broker="memory://", set_as_current=False)
    app.conf.relock_url = server.url

    @app.task(
        base=LockedTask, shared=False, lock_key="a", lock_order="sent", lock_dedup="until_done"
    )
    def ships():
        raise AssertionError

    request = Context(id="t1", args=(), kwargs={}, headers={})
    left = {"kept": [("a", 1)], "order": ("a", 1), "dedup": ("dedup\tships\ta", "until_done")}
    message.keep_header(request, message.Header("e1", **left))
    desk = Desk(server.url, "relock")
    for run, name in (("e1", "a"), (marker.hold_id("e1"), "dedup\tships\ta")):
        desk.acquire(run, KEPT, names=(name,), lease=600.0)
    desk.backend.place(PlaceRequest("order\ta", "e1", "t-e1", "call", 60.0, 0.0, 0.0, 600.0))
    server.client().save()

    server.kill()
    task_revoked.send(sender=app.tasks[ships.name], request=request, terminated=False)
    server.restart(keep_data=True)

    wait_for(lambda: not server.client().keys("relock:{0}:[lq]:*"), what="all of it to be free")
    assert not [text for text in caplog.messages if "annot" in text]
    desk.close()


def test_the_thread_that_consumes_asks_redis_nothing_for_a_revoked_message(
    monkeypatch, redis_url, namespace
):
    app = Celery("revoked", broker="memory://", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace)

    @app.task(base=LockedTask, shared=False, lock_key="a", lock_keep_on_retry=True)
    def ships():
        raise AssertionError

    request = Context(id="t1", args=(), kwargs={}, headers={})
    message.keep_header(request, message.Header("e1", kept=[("a", 1)]))
    desk = Desk(redis_url, namespace)
    desk.acquire("e1", KEPT, names=("a",), lease=600.0)
    asked_by = []

    backend = declaration.engine_of(app).backend
    release = backend.release

    def noted(*told, **more):
        asked_by.append(threading.get_ident())
        return release(*told, **more)

    monkeypatch.setattr(backend, "release", noted)
    monkeypatch.setattr(consumer, "_here", threading.local())
    consumer.remember_consumer()

    task_revoked.send(sender=app.tasks[ships.name], request=request, terminated=True)

    wait_for(lambda: not desk.backend.inspect("a").holds, what="the kept lock to be free")
    assert asked_by
    assert threading.get_ident() not in asked_by
    desk.close()


def test_a_revoked_message_is_looked_for_in_its_queue_only_if_it_may_be_parked(
    monkeypatch, redis_url, namespace
):
    app = Celery("revoked", broker="memory://", set_as_current=False)
    app.conf.update(relock_url=redis_url, relock_namespace=namespace)

    @app.task(base=LockedTask, shared=False, lock_key="a")
    def ships():
        raise AssertionError

    desk, engine = Desk(redis_url, namespace), declaration.engine_of(app)
    desk.fence("holder")
    for run in ("was-parked", "parks-now", "sent-again", "brought-back"):
        desk.park(run)
    withdraw, looked_for = engine.backend.withdraw, []

    def noted(execution_id, *told):
        looked_for.append(execution_id)
        return withdraw(execution_id, *told)

    monkeypatch.setattr(engine.backend, "withdraw", noted)
    for run, facts, redelivered, terminated in (
        ("never-parked", {}, False, False),
        ("was-parked", {"parked_at": "a"}, False, False),
        ("parks-now", {}, False, True),
        # The answer to the command that parked it was lost; or its acknowledgement.
        ("sent-again", {"attempts": 1}, False, False),
        ("brought-back", {}, True, False),
    ):
        told = {"redelivered": redelivered}
        request = Context(id=run, args=(), kwargs={}, headers={}, delivery_info=told)
        message.keep_header(request, message.Header(run, **facts))
        task_revoked.send(sender=app.tasks[ships.name], request=request, terminated=terminated)

    wait_for(lambda: desk.backend.inspect("a").waiting == 0, what="an empty queue")
    assert not [each for each in looked_for if each.startswith("never-parked")]
    desk.close()


def test_a_revoked_task_without_a_lock_is_none_of_ours(caplog):
    app = Celery("revoked", broker="memory://", set_as_current=False)
    app.conf.update(
        relock_url="redis://127.0.0.1:1/0", relock_order="sent", relock_dedup="until_done"
    )

    @app.task(shared=False)
    def plain(account):
        raise AssertionError

    request = Context(id="t1", args=("a",), kwargs={}, headers={})
    task_revoked.send(sender=app.tasks[plain.name], request=request, terminated=False)

    assert not caplog.messages
    assert app not in declaration._engines
    assert not is_lockable(app.tasks[plain.name])
