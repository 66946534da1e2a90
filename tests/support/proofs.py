"""How an ending is put to the proof.

It is run with and without a lock, once in a chain and once in a chord, and must come to the same
outcome each time: what Celery makes of it. A stranger waits for the lock; the time from the ending
to the stranger's entry is what the table in docs/endings.md shows.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from celery import chain, chord

from celery_relock import Lock
from tests.support.endings import Outcome
from tests.support.fenced import Fenced
from tests.support.keys import leftovers
from tests.support.parked import survey_of
from tests.support.waiting import wait_for
from tests.support.worker import Worker


class Case:
    """One message of a body that ends: its account, which is its lock's name, and its results."""

    def __init__(self, worker: Worker, url: str, body: str, ack: str, locked: bool, canvas: str):
        kind = "locked" if locked else "plain"
        self.ack, self.locked = ack, locked
        self.canvas = canvas
        self.account = f"{body}-{ack}-{kind}-{canvas}-{uuid.uuid4().hex[:8]}"
        self._worker, self._url, self._app = worker, url, worker.module.app
        self._task = self._app.tasks[f"{body}_{ack}_{kind}"]
        self.register, self.journal = Fenced(url, self.namespace), worker.journal
        self._lock = Lock(url, self.account, namespace=self.namespace)
        self.id = self._last = ""
        self._stranger: threading.Thread | None = None

    @property
    def namespace(self) -> str:
        return str(self._app.conf.relock_namespace)

    def send(self, **options: Any) -> None:
        module = self._worker.module
        member, then = self._task.si(self.account).set(**options), module.then.si(self.account)
        # Nobody waits for results here: what is collected after its Redis has gone looks for it.
        consumer = self._app.backend.result_consumer
        consumer.consume_from = consumer.cancel_for = lambda *_: None
        if self.canvas == "chain":
            failed = module.failed.si(self.account)
            last = chain(member, then).apply_async(link_error=[failed])
            self.id, self._last = last.parent.id, last.id
        else:
            # Two members: Celery makes a chain of a chord with one.
            last = chord([member, module.other.si(self.account)])(then)
            self.id, self._last = last.parent.results[0].id, last.id

    def events(self, name: str, count: int = 1, timeout: float = 30.0) -> list[Any]:
        """So many events of this account at least."""
        return self.journal.wait_for(name, timeout, count, account=self.account)

    def has(self, name: str) -> bool:
        """Whether there is such an event of this account by now."""
        return bool(self.journal.events(name, account=self.account))

    def ends_now(self) -> None:
        """What ends it comes from the test, now."""
        self.journal.add("ending", account=self.account)

    def await_stranger(self) -> None:
        """Put a stranger into the queue for the lock, unless a time limit has freed it by then."""
        lock = Lock(self._url, self.account, namespace=self.namespace, blocking_timeout=60)

        def enter() -> None:
            if lock.acquire():
                self.register.touch(self.account, lock.fence)
                self.journal.add("free", account=self.account, fence=lock.fence)
                lock.release()

        self._stranger = threading.Thread(target=enter, daemon=True)
        self._stranger.start()
        limited = self._task.soft_time_limit or self._task.time_limit
        wait_for(
            lambda: self.state_of_lock().waiting or (limited and self.has("free")),
            what=f"the stranger at {self.account}",
        )

    def state_of_lock(self) -> Any:
        return survey_of(self._lock._engine, self.account)

    def seconds_until_free(self, timeout: float = 30.0) -> float:
        """From the first ending to the entry of the stranger. It must have a higher fence."""
        free = self.events("free", timeout=timeout)[0]
        assert free["fence"] > self.events("inside")[0]["fence"]
        return float(free.at - self.events("ending")[0].at)

    def seconds_ago(self, name: str) -> float:
        """How long ago by the server's clock an event was."""
        return float(self.register.now() - self.events(name)[0].at)

    def outcome(self) -> Outcome:
        """As it stands. What is not looked at in this canvas is "-"."""
        sent = [what for what in ("next", "errback") if self.has(what)]
        state = self._app.backend.get_task_meta(self.id)["status"]
        if self.canvas == "chord":
            chord_state = self._app.backend.get_task_meta(self._last)["status"]
            return Outcome(state, "-", chord_state)
        return Outcome(state, "+".join(sent) or "nothing", "-")

    def comes_to(self, expected: Outcome, timeout: float = 30.0) -> None:
        """Wait for the outcome."""
        then = "-" if self.canvas == "chord" else expected.then
        last = "-" if self.canvas == "chain" else expected.chord

        def reached() -> bool:
            seen = self.outcome()
            return seen.state in expected.state.split(" or ") and seen[1:] == (then, last)

        try:
            wait_for(reached, timeout)
        except AssertionError:
            raise AssertionError(f"{self.account}: {self.outcome()} is not {expected}") from None

    def left_nothing(self, client: Any) -> None:
        """No overlap, nobody holds or waits, and no key of the lock is left."""
        if self._stranger is not None:
            self._stranger.join(20)
        touches = self.register.touches(self.account)
        assert touches == sorted(touches), f"overlap in {self.account}: {touches}"
        if self.locked:
            gone = f"nobody at {self.account}"
            wait_for(lambda: not _busy(self.state_of_lock()), 10, what=gone)
            mine = [f"{self.namespace}:{{0}}:{kind}:{self.account}" for kind in "lqwm"]
            assert client.exists(*mine) == 0, f"left behind, of {mine}"


def nothing_lasts(client: Any, namespace: str) -> None:
    """Of all keys in the namespace only the bucket's has no TTL."""
    every = leftovers(client, namespace)
    lasting = [key for key in every if client.ttl(key) == -1 and not key.endswith("}:meta")]
    assert lasting == [], f"without a TTL: {lasting}"


def _busy(state: Any) -> bool:
    return bool(state.holders) or bool(state.waiting)


def cases(
    worker: Worker, url: str, body: str, ack: str, canvases: Sequence[str] = ("chain", "chord")
) -> list[Case]:
    """The cases of an ending: with the lock in each canvas, then without it."""
    return [
        Case(worker, url, body, ack, locked, canvas)
        for locked in (True, False)
        for canvas in canvases
    ]


def prove(
    group: Sequence[Case],
    client: Any,
    expected: Outcome,
    end: Callable[[Case], None] | None = None,
    *,
    over: bool = False,
) -> list[float]:
    """Run cases side by side until each has come to its end.

    Args:
        end: what ends a case from outside; None lets its body go on to its own end.
        over: wait until the worker's child is done with it, for outcomes that are nothing at all.

    Returns:
        For each locked case, the seconds from its ending until its lock was free.
    """
    for case in group:
        case.send()
    for case in group:
        case.events("inside")
        if case.locked:
            case.await_stranger()
    for case in group:
        if end is None:
            case.register.let_go(case.account)
        else:
            case.ends_now()
            end(case)
    seconds = [case.seconds_until_free() for case in group if case.locked]
    for case in group:
        if over:
            case.events("over")
        case.comes_to(expected)
        case.left_nothing(client)
    return seconds
