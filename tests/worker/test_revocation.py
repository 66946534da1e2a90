"""What a revoked message leaves, while Redis cannot be reached."""

from __future__ import annotations

from celery import Celery
from celery.app.task import Context
from celery.signals import task_revoked

import celery_relock.worker.revocation  # noqa: F401  # its receiver
from celery_relock import LockedTask, declaration
from celery_relock.declaration import engine_of, is_locked
from celery_relock.worker import message
from tests.support import wait_for


def test_what_cannot_be_cleared_away_is_said_of_each_and_keeps_no_other_from_it(caplog, own_redis):
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

    server.kill()
    task_revoked.send(sender=app.tasks[ships.name], request=request, terminated=False)

    said = [text.partition(",")[0] for text in caplog.messages if text.startswith("Cannot release")]
    assert said == [
        "Cannot release the lock kept for t1",
        "Cannot release the place of t1 in its order",
        "Cannot release the dedup marker of t1",
    ]
    server.restart(keep_data=False)
    wait_for(lambda: not engine_of(app).later._is_running, what="its withdrawal")
    assert not [text for text in caplog.messages if "cannot be made up for" in text]


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
