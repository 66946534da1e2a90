"""What a message is given when it is published, by a process with several apps."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, current_app
from celery.app.task import Context
from celery.signals import before_task_publish
from celery.worker.request import Request

from celery_relock import LockedTask, declaration
from celery_relock.declaration import forget_engine
from celery_relock.dedup import marker
from celery_relock.worker.message import HEADER, VERSION, Header, moment, parse


def an_app(prefix: Any) -> Any:
    """An app whose locks have this prefix, with a plain task and a locked one."""
    app = Celery(uuid.uuid4().hex, broker="memory://", set_as_current=False)
    app.conf.update(relock_url="memory://", relock_prefix=prefix)

    @app.task(name=f"{app.main}.plain")
    def plain() -> None: ...

    @app.task(base=LockedTask, name=f"{app.main}.locked", lock_key="a")
    def under_lock() -> None: ...

    return app


@pytest.mark.parametrize("current", [0, 1])
def test_a_message_has_the_prefix_of_the_app_that_sends_it_whichever_is_the_current_one(
    current: int, request: pytest.FixtureRequest
) -> None:
    apps = [an_app("acme:"), an_app("other:")]
    request.addfinalizer(current_app._get_current_object().set_current)
    apps[current].set_current()
    found: list[str] = []

    def look(headers: Any, **_: Any) -> None:
        found.append(headers[HEADER]["prefix"])

    before_task_publish.connect(look)
    for app in apps:
        app.tasks[f"{app.main}.plain"].delay()
        app.tasks[f"{app.main}.locked"].delay()
        app.send_task("somebody.elses")
    before_task_publish.disconnect(look)

    assert found == ["acme:"] * 3 + ["other:"] * 3


def test_a_message_that_is_sent_again_says_that_it_was_redelivered() -> None:
    for told in (True, False):
        header = Header("e").again(Context(delivery_info={"redelivered": told}))
        assert header.redelivered is told
        assert parse(header.content()) == header


def _prefix_of_a_plain_message(app: Any) -> str:
    found: list[str] = []

    def look(headers: Any, **_: Any) -> None:
        found.append(headers[HEADER]["prefix"])

    before_task_publish.connect(look)
    app.tasks[f"{app.main}.plain"].delay()
    before_task_publish.disconnect(look)
    return found[0]


@pytest.mark.parametrize("forget", [lambda _: declaration.forget_settings(), forget_engine])
def test_a_message_has_the_prefix_that_its_app_has_now(forget: Any) -> None:
    app = an_app("acme:")
    assert _prefix_of_a_plain_message(app) == "acme:"
    app.conf.relock_prefix = "other:"
    forget(app)  # as in tests of a project of Django, and with the plugin for pytest

    assert _prefix_of_a_plain_message(app) == "other:"


def test_a_message_has_the_prefix_of_the_locked_task_that_was_declared_last() -> None:
    app = an_app("acme:")
    assert _prefix_of_a_plain_message(app) == "acme:"
    app.conf.relock_prefix = "other:"

    @app.task(base=LockedTask, lock_key="a", shared=False, lazy=False)
    def late() -> None: ...

    assert _prefix_of_a_plain_message(app) == "other:"


@pytest.mark.parametrize("failing", [lambda: 42, lambda: 1 / 0])
def test_a_plain_message_is_sent_and_has_a_header_if_the_prefix_cannot_be_had(
    failing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app, found = an_app(failing), []

    def look(headers: Any, **_: Any) -> None:
        found.append(headers[HEADER])

    before_task_publish.connect(look)
    app.tasks[f"{app.main}.plain"].delay()
    before_task_publish.disconnect(look)

    assert "prefix" not in found[0]
    assert "a message is sent with the prefix '': settings: the callable in" in caplog.text


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
@pytest.mark.parametrize("tzinfo", [None, timezone.utc, timezone(timedelta(hours=5))])
def test_a_time_is_the_moment_that_a_worker_takes_it_for(zone: str, tzinfo: Any) -> None:
    app = an_app("")
    app.conf.timezone = zone
    eta, expires = datetime(2040, 7, 1, 12, tzinfo=tzinfo), datetime(2040, 7, 1, 13, tzinfo=tzinfo)
    queue = app.amqp.queues.select_add(app.main)
    app.tasks[f"{app.main}.plain"].apply_async(eta=eta, expires=expires, queue=queue.name)
    with app.connection_for_read() as connection:
        message = queue(connection.default_channel).get()
    received = Request(message, app=app)

    assert moment(eta) == moment(message.headers["eta"]) == received.eta.timestamp()
    assert moment(expires) == moment(message.headers["expires"]) == received.expires.timestamp()


def test_a_call_that_is_not_to_expire_does_not_whatever_its_task_says() -> None:
    app = an_app("")
    task = app.tasks[f"{app.main}.locked"]
    task.expires = 60
    queue = app.amqp.queues.select_add(app.main)
    task.apply_async(expires=None, queue=queue.name)
    with app.connection_for_read() as connection:
        assert queue(connection.default_channel).get().headers["expires"] is None

    # A second more than it lives, as a worker's clock may be behind.
    assert marker.counts_for(task, {"expires": None}) > 61.0 == marker.counts_for(task, {})
    assert marker.counts_for(task, {"expires": 5}) == 6.0


@pytest.mark.parametrize(
    "since", ["soon", -1, float("nan"), float("inf"), 1e308, pytest.param(10**400, id="no float")]
)
def test_a_header_with_a_time_that_is_none_counts_as_left_out(since: object) -> None:
    header = {"v": VERSION, "execution_id": "e", "attempts": 1}

    assert parse({**header, "since": since}) is None
    assert parse({**header, "since": 5}) == Header("e", attempts=1, since=5.0)
