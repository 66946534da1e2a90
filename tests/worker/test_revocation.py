"""What a revoked message leaves, while Redis cannot be reached."""

from __future__ import annotations

from celery import Celery
from celery.app.task import Context
from celery.signals import task_revoked

import celery_relock.worker.revocation  # noqa: F401  # its receiver
from celery_relock import LockedTask, declaration
from celery_relock.declaration import is_locked
from celery_relock.dedup import marker
from celery_relock.engine.protocol import KEPT, PlaceRequest
from celery_relock.worker import message
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
    message.note(request, message.Header("e1", **left))
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
    assert not is_locked(type(app.tasks[plain.name]))
