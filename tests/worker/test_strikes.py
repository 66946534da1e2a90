"""A signal's exception, such as a time limit's, or a kill, that strikes where the interpreter looks
for signals: where some function of ours begins, or has called one that is built in; at each of them
in turn."""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from celery import Celery
from celery._state import _task_stack
from celery.app.trace import build_tracer
from celery.exceptions import SoftTimeLimitExceeded
from celery.utils import threads
from redis import Redis

import celery_relock
from celery_relock import Lock, LockedTask
from celery_relock.declaration import engine_of
from celery_relock.dedup import marker
from celery_relock.engine import crash, ids, reentrancy
from celery_relock.engine.engine import Engine
from celery_relock.engine.protocol import KEPT, LINE
from celery_relock.engine.renewal import keepalive
from celery_relock.errors import LockUnavailable
from celery_relock.worker import bootstep, conflict
from celery_relock.worker.delivery import afterwards, finish
from celery_relock.worker.message import VERSION, inside
from celery_relock.worker.parking import CARRIED, Carried, RawMessage
from tests.support.long import LONG
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

PACKAGE = f"{Path(celery_relock.__file__).parent}{os.sep}"
PLAIN: dict[str, Any] = {}
OPTIONS: list[dict[str, Any]] = [
    PLAIN,
    {"lock_hold": "workflow"},
    {"lock_dedup": "until_start", "lock_on_duplicate": "replace"},
    {"lock_dedup": "until_done", "lock_order": "sent"},
    {"lock_keep_on_retry": True, "autoretry_for": (OSError,)},
    {"lock_dedup": "until_done", "lock_order": "sent", "autoretry_for": (OSError,)},
]


class Stop(Exception):
    """What somebody's signal handler raises."""


class Subject(NamedTuple):
    """A task, whose calls get a lock name of their own."""

    task: Any
    engine: Engine
    call: Callable[[str], Any]
    run: Callable[..., Any]

    def attempts(self, name: str) -> set[str]:
        """Which attempts have something of the call with this name. What is left to the next step,
        or to a retry, belongs to none."""
        names = name, LINE + name, marker.name_for(self.task.name, [name])
        return {hold.attempt_id for each in names for hold in self.engine.inspect(each).holds}


Make = Callable[[dict[str, Any]], Subject]


@pytest.fixture
def make(redis_url: str, namespace: str) -> Iterator[Make]:
    app = Celery(broker="memory://", set_as_current=False)
    app.conf.update(
        relock_url=redis_url, relock_namespace=namespace, task_default_queue=uuid.uuid4().hex
    )

    @app.task(shared=False)
    def after() -> None: ...

    def make(options: dict[str, Any]) -> Subject:
        @app.task(base=LockedTask, shared=False, lock_key="{name}", **options)
        def body(name: str) -> None:
            if "autoretry_for" in options:
                raise OSError

        task = app.tasks[body.name]
        tracer = build_tracer(task.name, task, app=app)
        headers = {"id": "x", "task": task.name}
        raw = RawMessage(b"[[], {}, {}]", "application/json", "utf-8", headers, {}, "", "celery")
        received = {CARRIED: Carried(raw)}

        def run(name: str, task_id: str = "", **header: Any) -> Any:
            # With an id, as Celery sends each step: the worker of 5.4 fails at one without.
            behind = after.si().set(task_id=uuid.uuid4().hex)
            own = task_id or name
            request = {"id": own, "hostname": "here", "chain": [behind], "properties": received}
            if header:
                request["relock"] = {"v": VERSION, "execution_id": name, **header}
            return tracer(own, (name,), {}, request)

        return Subject(task, engine_of(task.app), task, run)

    logging.disable()  # Celery tells of each strike, with a traceback
    yield make
    logging.disable(logging.NOTSET)
    while _task_stack.top is not None:  # Celery has been struck where it was to take a task off
        _task_stack.pop()
    app.close()


def is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def is_a_stack_for_us(frame: FrameType) -> bool:
    """Whether it is one of Celery's stacks, which we have called."""
    return frame.f_code.co_filename == threads.__file__ and is_ours(frame.f_back)


def at_look(
    number: int, strike: Callable[[], None], at: Callable[[FrameType], bool] = is_ours
) -> Any:
    """For `sys.setprofile`: strike where the interpreter looks for signals for so many times."""
    left = number

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and at(frame):
            left -= 1
            if left == 0:
                strike()

    return profile


@contextmanager
def striking(
    number: int, error: type[Exception], at: Callable[[FrameType], bool] = is_ours
) -> Iterator[list[int]]:
    """Raise an error at such a look. Yields a list that stays empty if there are fewer of them."""
    struck = []

    def strike() -> None:
        struck.append(number)
        raise error

    sys.setprofile(at_look(number, strike, at))
    try:
        yield struck
    finally:
        sys.setprofile(None)
        finish()  # as the next message does, if the end of this one was struck


# Thrown into a generator that ends, an exception is told of and goes no further.
ends_a_generator = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@ends_a_generator
@pytest.mark.parametrize(
    ("is_message", "options"), [(False, PLAIN), *((True, each) for each in OPTIONS)], ids=str
)
def test_wherever_a_signal_strikes_no_lock_is_left_that_somebody_renews(
    make: Make, is_message: bool, options: dict[str, Any]
) -> None:
    subject = make(options)
    before = set(keepalive.leases())  # of tests before this one

    def run_it() -> list[int]:
        with striking(number, Stop) as struck, suppress(Stop):
            (subject.run if is_message else subject.call)(name)
        assert reentrancy.innermost() is None, number
        return struck

    number, struck = 0, [0]
    while struck:  # until a call comes to its end
        number, name = number + 1, uuid.uuid4().hex
        struck = Context().run(run_it)
        assert set(keepalive.leases()) <= before, number
        assert subject.attempts(name) <= {KEPT}, number
    assert number > 50


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[4], OPTIONS[5]], ids=str)
def test_wherever_a_signal_strikes_in_the_list_of_what_is_to_be_done_it_is_done(
    make: Make, options: dict[str, Any]
) -> None:
    subject = make(options)

    def run_it() -> list[int]:
        with striking(number, Stop, is_a_stack_for_us) as struck, suppress(Stop):
            subject.run(name)
        return struck

    number, struck = 0, [0]
    while struck:  # until a call comes to its end
        number, name = number + 1, uuid.uuid4().hex
        struck = Context().run(run_it)
        assert subject.attempts(name) <= {KEPT}, number
    assert number > 5


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[4], OPTIONS[5]], ids=str)
def test_what_a_message_has_left_whose_end_nobody_told_is_released_by_the_next_one(
    make: Make, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    for told in ("celery.app.trace.send_postrun", "celery.signals.task_retry.send"):
        monkeypatch.setattr(told, lambda **_: [])
    subject, name = make(options), uuid.uuid4().hex
    subject.run(name)
    assert subject.attempts(name) - {KEPT}
    Context().run(subject.run, uuid.uuid4().hex)
    assert subject.attempts(name) <= {KEPT}
    finish()


def test_a_message_is_inside_of_no_body_that_was_struck_before(make: Make) -> None:
    subject = make(PLAIN)

    def run_it() -> list[int]:
        with striking(number, Stop) as struck, suppress(Stop):
            subject.run(uuid.uuid4().hex)
        left.append(len(inside.get()))
        subject.run(uuid.uuid4().hex)
        assert not inside.get(), number
        return struck

    number, struck, left = 0, [0], list[int]()
    while struck:  # until a call comes to its end
        number += 1
        struck = Context().run(run_it)
    assert 1 in left, "none was struck where it mattered"


def overrun(subject: Subject, number: int, name: str, **header: Any) -> tuple[list[int], str]:
    """Run a message whose time limit strikes. Returns as `striking`, and its state."""
    with striking(number, SoftTimeLimitExceeded) as struck:
        state = subject.run(name, **header).info.state
    return struck, state


@ends_a_generator
@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[3]], ids=str)
def test_wherever_a_time_limit_strikes_a_message_either_fails_or_is_parked(
    make: Make, redis_url: str, namespace: str, options: dict[str, Any]
) -> None:
    subject = make(options)

    number, struck = 0, [0]
    while struck:  # until a call comes to its end
        number, name = number + 1, uuid.uuid4().hex
        with Lock(redis_url, name, namespace=namespace):
            struck, state = Context().run(overrun, subject, number, name)
            wait_for(lambda: not subject.engine.later._calls, what="what is withdrawn")
            parked = subject.engine.inspect(name).waiting
        assert (state, parked) in (("IGNORED", 1), ("FAILURE", 0)), number
    assert number > 100


@ends_a_generator
@pytest.mark.parametrize("policy", ["wait", "retry"])
def test_wherever_a_time_limit_strikes_a_message_that_is_rejected_can_be_brought_back(
    make: Make, redis_url: str, namespace: str, client: Redis, policy: str
) -> None:
    """As by a dead-letter queue: its execution does not count as ended."""
    rejected = {"acks_late": True, "acks_on_failure_or_timeout": False}
    subject = make({**rejected, "lock_on_conflict": policy})

    number, struck = 0, [0]
    while struck:  # until a call comes to its end
        number, name = number + 1, uuid.uuid4().hex
        with Lock(redis_url, name, namespace=namespace):
            struck, state = Context().run(overrun, subject, number, name, attempts=0)
            wait_for(lambda: not subject.engine.later._calls, what="what is withdrawn")
        tombstone = client.get(subject.engine.backend.keys.tombstone(ids.short(name), 0)) or b""
        assert state != "FAILURE" or not tombstone.startswith(b"*"), number
    assert number > 100


@ends_a_generator
def test_wherever_a_time_limit_strikes_what_is_sent_has_the_lock_of_its_workflow(
    make: Make,
) -> None:
    subject = make({"lock_hold": "workflow"})

    def run_it() -> list[int]:
        with striking(number, SoftTimeLimitExceeded) as struck:
            subject.run(uuid.uuid4().hex)
        return struck

    number, struck, without = 0, [0], []
    while struck:  # until a call comes to its end
        number += 1
        struck = Context().run(run_it)
        for headers in sent(subject.task.app):
            told = headers.get("relock", {}).get("workflow_locks", ())
            if [lock["id"] for lock in told] != headers["stamps"].get("relock_workflow"):
                without.append(number)
    assert number > 100
    assert len(without) <= 1  # where the receiver itself begins


@ends_a_generator
def test_wherever_a_time_limit_strikes_a_call_leaves_no_place_and_no_marker(make: Make) -> None:
    subject = make(OPTIONS[3])
    task, engine = subject.task, subject.engine

    def run_it() -> list[int]:
        with striking(number, SoftTimeLimitExceeded) as struck:
            subject.run(name, headers["id"], **headers["relock"])
        return struck

    number, struck = 0, [0]
    while struck:  # until a call comes to its end
        number, name = number + (1 if LONG else 3), uuid.uuid4().hex
        task.delay(name)
        headers = next(each for each in sent(task.app) if each["task"] == task.name)
        assert engine.inspect(LINE + name).waiting == 1
        struck = Context().run(run_it)
        wait_for(lambda: not engine.later._calls, what="what is cleared away")
        assert engine.inspect(LINE + name).waiting == 0, number
        assert not engine.inspect(marker.name_for(task.name, [name])).holds, number
    assert number > 100


@ends_a_generator
def test_wherever_a_time_limit_strikes_who_sends_a_call_that_is_not_sent_has_no_place(
    make: Make,
) -> None:
    subject = make({"lock_order": "sent"})
    engine = subject.engine

    number, struck = 0, [0]
    while struck:  # until a call comes to its end
        number, name = number + 1, uuid.uuid4().hex
        with striking(number, SoftTimeLimitExceeded) as struck, suppress(SoftTimeLimitExceeded):
            subject.task.delay(name)
        is_sent = len(sent(subject.task.app))
        wait_for(lambda: not engine.later._calls, what="what is cleared away")
        assert engine.inspect(LINE + name).waiting == is_sent, number
    assert number > 100


@ends_a_generator
def test_wherever_a_time_limit_strikes_a_step_the_lock_of_its_workflow_is_free(make: Make) -> None:
    subject = make({"lock_hold": "workflow"})
    app, engine = subject.task.app, subject.engine
    bootstep.prepare(app)

    def run_it() -> list[int]:
        subject.run(name)
        (headers,) = sent(app)
        step = app.tasks[headers["task"]]
        tracer = build_tracer(step.name, step, app=app)
        assert engine.inspect(name).holds
        with striking(number, SoftTimeLimitExceeded) as struck:
            tracer(headers["id"], (), {}, {**headers, "hostname": "here"})
        return struck

    number, struck = 0, [0]
    while struck:  # until a call comes to its end
        number, name = number + 1, uuid.uuid4().hex
        struck = Context().run(run_it)
        wait_for(lambda: not engine.later._calls, what="what is cleared away")
        assert not engine.inspect(name).holds, number
    assert number > 100


def sent(app: Celery) -> list[dict[str, Any]]:
    """The headers of what was sent."""
    with app.connection_for_read() as connection:
        channel, queue = connection.default_channel, app.conf.task_default_queue
        channel.queue_declare(queue)
        return [each.headers for each in iter(lambda: channel.basic_get(queue, True), None)]


def test_a_message_that_was_parked_and_is_struck_before_it_begins_leaves_no_place(
    make: Make, redis_url: str, namespace: str
) -> None:
    def strike() -> None:
        raise SoftTimeLimitExceeded

    subject, name = make(PLAIN), uuid.uuid4().hex
    with Lock(redis_url, name, namespace=namespace):
        subject.run(name, attempts=0)
        assert subject.engine.inspect(name).waiting == 1
        afterwards(strike)  # what the message before has left
        assert subject.run(name, attempts=1, parked_at=name).info.state == "FAILURE"
        assert subject.engine.inspect(name).waiting == 0


def test_a_message_that_was_parked_and_is_struck_without_redis_and_broker_leaves_no_place(
    make: Make, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_away(*_: Any) -> Any:
        raise LockUnavailable("away")

    def strike(_: float) -> None:
        raise SoftTimeLimitExceeded

    subject, name = make({"lock_on_unavailable": "retry"}), uuid.uuid4().hex
    with Lock(redis_url, name, namespace=namespace):
        subject.run(name, attempts=0)
        with monkeypatch.context() as patch:
            patch.setattr(subject.engine.backend, "acquire", is_away)
            patch.setattr(conflict, "send_again", lambda *_: False)
            patch.setattr(conflict, "time", SimpleNamespace(**{**vars(time), "sleep": strike}))
            assert subject.run(name, attempts=1, parked_at=name).info.state == "FAILURE"
        wait_for(lambda: not subject.engine.later._calls, what="what is withdrawn")
        assert subject.engine.inspect(name).waiting == 0


# The children of a process with threads do no more than a pool's child does.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[3], OPTIONS[4]], ids=str)
def test_wherever_a_process_is_killed_a_reaper_frees_what_it_had(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    subject = make(options)
    monkeypatch.setattr(crash.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(crash.journal, "on", True)
    reaper = crash.Reaper(subject.engine.parking)
    number, status = 0, -1
    while status != 0:  # until a call comes to its end
        number, name = number + (1 if LONG else 9), uuid.uuid4().hex
        child = os.fork()
        if child == 0:
            sys.setprofile(at_look(number, lambda: os._exit(9)))
            Context().run(subject.run, name)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        reaper.look()
        assert subject.attempts(name) <= {KEPT}, number
    assert number > 50
