"""A pytest plugin: tests of tasks and their locks, without a Redis.

    def test_only_one_charge_at_a_time(relock):
        with relock.hold("account:42"), pytest.raises(LockConflict):
            charge(42, 10)

pytest loads this module in every run, so it imports Celery only when a test asks for `relock`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from .engine.engine import Engine
    from .engine.protocol import HoldInfo

# Fixtures of Celery's own plugin (`celery.contrib.pytest`).
_APPS = ("celery_app", "celery_session_app")
_WORKERS = ("celery_worker", "celery_session_worker")


class Sent(NamedTuple):
    """A message that a task's call has sent, with the arguments as they are in the message."""

    task_id: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Relock:
    """The locks of an app in the memory of this process, for one test; see the fixture `relock`.

    Attributes:
        app (celery.Celery): the Celery app.
    """

    def __init__(self, app: Any, engine: Engine) -> None:
        self.app = app
        self._first = engine
        self._used = {engine}
        self._sent: dict[str, dict[str, Sent]] = {}

    @property
    def _engine(self) -> Engine:
        """That of the tasks now: settings that a test overrides can have another namespace."""
        from .declaration import engine_of
        from .settings import in_memory

        engine = engine_of(self.app) if in_memory(self.app) else self._first
        self._used.add(engine)
        return engine

    def held(self, name: str) -> bool:
        """Whether anybody holds a lock."""
        return bool(self._engine.inspect(_text(name, "held")).holds)

    def waiting(self, name: str) -> int:
        """How many executions wait for a lock, in a process or parked. A call that has its place in
        an order (`lock_order`) counts when a worker has received it."""
        backend: Any = self._engine.backend
        return int(backend.waiting(_text(name, "waiting")))

    @contextmanager
    def hold(self, name: str, permits: int = 1) -> Iterator[int]:
        """Hold a lock as somebody else would: no task can re-enter it. A call in this thread that
        would wait raises `LockDeadlock`, a `LockConflict`, at once, because the block cannot end
        before the call returns. A task in a worker waits until the block has ended.

        Args:
            permits: how many permits of the lock to hold, for a task with a `lock_limit`.

        Yields:
            The fencing token.

        Raises:
            LockConflict: somebody else holds the lock.
            LockConfigError: no lock can have this name.
            ValueError: `permits` is not a whole number from 1.
        """
        if type(permits) is not int or permits < 1:
            raise ValueError(f"permits={permits!r} cannot be used. Use a whole number from 1.")
        with ExitStack() as stack:
            tokens = [stack.enter_context(self._held(name, n + 1)) for n in range(permits)]
            yield tokens[0]

    def expire(self, name: str) -> None:
        """Let the lease of a lock's holder run out, as if nobody had renewed it: `self.lock`, or a
        `Lock`, is lost at once, and the next waiter gets the lock.

        Raises:
            LookupError: nobody holds the lock.
        """
        holds = self._engine.backend.inspect(_text(name, "expire"), most=sys.maxsize).holds
        if not holds:
            raise LookupError(f"nobody holds the lock {name!r}")
        # In another thread, as in production: the loss can interrupt this very call.
        ends = Thread(target=self._end, args=(name, holds))
        ends.start()
        ends.join()

    def _end(self, name: str, holds: Sequence[HoldInfo]) -> None:
        from .engine.renewal import keepalive

        for hold in holds:
            lease = keepalive.find(hold.execution_id, hold.attempt_id)
            if lease is not None:
                keepalive.lose(lease, "the test let it expire")
        self._engine.backend.force_release(name)

    def sent(self, task: Any) -> list[Sent]:
        """The messages that calls of a task, or of a task's name, have sent since the test began.
        A call that `lock_dedup` swallows sends none; the calls of a burst (`lock_debounce`) are one
        message, that of the last; retries and resumed messages are not calls.

        Raises:
            RuntimeError: the app runs tasks where they are called (`task_always_eager`), so no call
                sends a message, and `lock_dedup` is not asked.
        """
        if self.app.conf.task_always_eager:
            raise RuntimeError(
                "with task_always_eager no call sends a message, and no call is a duplicate. To "
                'test what is sent, set task_always_eager to False and broker_url to "memory://"'
            )
        return list(self._sent.get(getattr(task, "name", task), {}).values())

    def _note(self, sender: Any = None, headers: Any = None, body: Any = None, **_: Any) -> None:
        if "id" in headers and not headers["retries"]:
            called = Sent(headers["id"], tuple(body[0]), dict(body[1]))
            self._sent.setdefault(str(sender), {})[called.task_id] = called

    @contextmanager
    def _held(self, name: str, limit: int) -> Iterator[int]:
        from .engine import ids, reentrancy
        from .engine.events import describe_conflict, label_of
        from .engine.lease import Lease, State
        from .engine.protocol import Claim, Held
        from .errors import LockConflict
        from .naming.template import check_name

        check_name(_text(name, "hold"), "hold")
        me, attempt_id = ids.new_id(), ids.new_attempt_id()
        claim = Claim(me, attempt_id, me, (name,), (limit,), 30.0, label_of("relock.hold"))
        engine = self._engine  # in the block the settings can change
        lease = engine.lease(claim)
        answer = engine.acquire(lease)
        if not isinstance(answer, Held):
            raise LockConflict(describe_conflict(name, answer), name=name)
        # On the call stack, so that a call that would wait here raises LockDeadlock; as a lost
        # lease without a lock, so that no call re-enters it.
        nobody = claim._replace(names=(), limits=(), owner=ids.new_id())
        on_the_stack = Lease(nobody, engine.backend)
        on_the_stack.switch(State.LOST, State.NEW)
        reentrancy.push(on_the_stack)
        try:
            yield answer.fences[0]
        finally:
            reentrancy.pop(on_the_stack)
            engine.release(lease)


def _text(name: object, asked: str) -> str:
    """A lock name. What is none, such as a task, would be a lock that nobody holds."""
    from .errors import LockConfigError

    if isinstance(name, str):
        return name
    raise LockConfigError(f"{asked}({name!r:.80}) cannot be used. Use a lock name, as text.")


@pytest.fixture
def relock_app(request: pytest.FixtureRequest) -> Any:
    """The app of the fixture `relock`: `celery_app` or `celery_session_app` if the test uses one of
    them, else Celery's current app. To use another app, define a fixture of this name."""
    for name in _APPS:
        if name in request.fixturenames:
            return request.getfixturevalue(name)
    from celery import current_app

    app = current_app._get_current_object()
    if app.main == "default":  # Celery's fallback, if nobody has created an app
        raise pytest.UsageError(
            "relock: no Celery app has been made yet. Import yours in conftest.py or at the top of "
            "the test's module, or define a fixture relock_app that returns it"
        )
    return app


@pytest.fixture
def relock(request: pytest.FixtureRequest, relock_app: Any) -> Iterator[Relock]:
    """A `Relock` for the locks of `relock_app`, which are free and in the memory of this process.
    If the app's settings say otherwise, the fixture changes them for this test."""
    from celery.signals import before_task_publish

    from .declaration import engine_of

    with _in_memory(relock_app, request):
        engine = engine_of(relock_app)
        _clear(engine)
        locks = Relock(relock_app, engine)
        before_task_publish.connect(locks._note)
        try:
            yield locks
        finally:
            before_task_publish.disconnect(locks._note)
            for used in locks._used:
                _clear(used)


@contextmanager
def _in_memory(app: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    from .declaration import forget_engine
    from .settings import in_memory

    wanted = {"relock_url": "memory://", "relock_enabled": True}
    if in_memory(app):
        yield
        return
    asked = request.fixturenames
    if "relock" in asked:  # else it is asked for by `getfixturevalue`, after the others
        asked = asked[: asked.index("relock")]
    if early := [each for each in _WORKERS if each in asked]:
        # pytest makes the fixtures of a session first, in whatever order a test names them.
        cure = "" if "session" in early[-1] else ", or name relock first"
        raise pytest.UsageError(
            f"{early[-1]} starts before relock, so its locks are not those of this test: set "
            f"relock_url='memory://' in the test's settings{cure}"
        )
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in wanted.items():
                patch.setitem(app.conf.maps[0], name, value)
            forget_engine(app)
            yield
    finally:
        forget_engine(app)


def _clear(engine: Engine) -> None:
    """Forget every lock. A lock that a test still holds is no longer renewed or re-entered."""
    from .engine.renewal import keepalive

    backend: Any = engine.backend
    for lease in keepalive.leases():
        if lease.backend is backend:
            lease.give_up()
            keepalive.discard(lease)
    backend.clear()
