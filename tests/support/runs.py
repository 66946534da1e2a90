"""Leases of one engine, as a test of engines writes them."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from celery_relock.engine import ids
from celery_relock.engine.engine import Engine
from celery_relock.engine.lease import Lease, State
from celery_relock.engine.parking import Sender
from celery_relock.engine.protocol import Claim, Held, Message
from celery_relock.engine.wakeup import OPENING
from celery_relock.errors import LockUnavailable
from tests.support.waiting import wait_for


class Outbox(Sender):
    """Takes parked messages, as a broker would.

    Attributes:
        sent, texts: their executions, and what they are.
    """

    homes = "h"

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.texts: list[str] = []

    def send(self, message: Message) -> None:
        self.sent.append(message.execution_id)
        self.texts.append(message.text)


class Runs:
    """Leases for one engine, made with as few words as a test likes to read."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def lease(self, *names: str, lease: float = 30.0, **claim: Any) -> Lease:
        run = claim.pop("execution_id", None) or ids.new_id()
        claim = {
            "attempt_id": ids.new_attempt_id(),
            "owner": run,
            "limits": (1,) * len(names),
            **claim,
        }
        return self.engine.lease(Claim(execution_id=run, names=names, lease=lease, **claim))

    def held(self, *names: str, wait: float | None = 0.0, **claim: Any) -> Lease:
        """A lease that has its locks."""
        lease = self.lease(*names, **claim)
        answer = self.engine.acquire(lease, wait)
        assert isinstance(answer, Held), answer
        return lease

    def release(self, lease: Lease) -> bool:
        return self.engine.release(lease)

    def release_at_last(self, lease: Lease) -> bool:
        """Release, again and again: after an outage a single failure ends a try."""
        released: list[bool] = []

        def tried() -> bool:
            with suppress(LockUnavailable):
                released.append(self.engine.release(lease))
            return bool(released)

        wait_for(tried, what="the release to be answered")
        return released[0]

    def ready(self) -> None:
        """See that the next wait asks for a place at once."""
        lease = self.lease("any")
        with self.engine.inbox.opening(lease.ring) as tried:
            lease.sleep(OPENING, tried)

    def waiting(self, lease: Lease, seconds: float | None = 60.0) -> Waiting:
        """Acquire a lease in a thread; returns when it stands in line."""
        return Waiting(self, lease, seconds)


class Waiting(threading.Thread):
    """Waits for what somebody else holds, and ends with an answer.

    Attributes:
        answer: what came of it, also a `LockUnavailable`; None before.
    """

    def __init__(self, runs: Runs, lease: Lease, seconds: float | None) -> None:
        super().__init__(daemon=True)
        self.runs, self.lease, self._seconds = runs, lease, seconds
        self.answer: Any = None
        self.start()
        wait_for(lambda: lease.state is State.WAITING, what="a place in line")

    def run(self) -> None:
        try:
            self.answer = self.runs.engine.acquire(self.lease, self._seconds)
        except LockUnavailable as error:
            self.answer = error

    def entered(self, timeout: float = 30.0) -> Lease:
        """Its lease, as soon as that has its locks."""
        self.join(timeout)
        assert not self.is_alive(), "it still waits"
        assert isinstance(self.answer, Held), self.answer
        return self.lease
