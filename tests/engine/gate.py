"""A store with a gate: a test decides what happens while a renewal is on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.backends.redis.urls import transport_for_url
from celery_relock.engine.engine import Engine
from celery_relock.engine.protocol import Held, Queued, Renewal
from celery_relock.engine.renewal import keepalive
from tests.support.runs import Runs


class Gate:
    """Where one renewal of the keep-alive thread stops until the test opens it."""

    def __init__(self) -> None:
        self._arrived, self._opened = threading.Event(), threading.Event()
        self._passed = threading.Event()

    def wait(self, seconds: float = 30.0) -> None:
        assert self._arrived.wait(seconds), "no renewal came to the gate"

    def open(self) -> None:
        self._opened.set()
        assert self._passed.wait(30), "the renewal did not come through"

    def stop(self) -> None:
        self._arrived.set()
        self._opened.wait(30)


class GatedStore(RedisBackend):
    """A RedisBackend whose next renewal can be stopped before it is sent, or before its answer is
    believed, or made to fail."""

    def __init__(self, url: str, namespace: str):
        super().__init__(transport_for_url(url), namespace)
        self._before: Gate | None = None
        self._after: Gate | None = None
        self._beat: Gate | None = None
        self._fail: list[BaseException] = []
        self.renewals = 0

    @contextmanager
    def stopped(self, *, answered: bool = False, heartbeat: bool = False) -> Iterator[Gate]:
        """Let the keep-alive thread look, and wait until a renewal stands at the gate, or a
        heartbeat that was not sent yet; it is opened at the end at the latest."""
        gate = Gate()
        if heartbeat:
            self._beat = gate
        elif answered:
            self._after = gate
        else:
            self._before = gate
        keepalive.look_now(self)
        try:
            gate.wait()
            yield gate
        finally:
            gate._opened.set()

    def fail_next(self, *errors: BaseException) -> None:
        self._fail.extend(errors)

    def renew(
        self, renewals: Sequence[Renewal], *, within: float | None = None, once: bool = False
    ) -> list[bool]:
        if within is None or once:  # not the keep-alive thread
            return super().renew(renewals, within=within, once=once)
        before, self._before = self._before, None
        after, self._after = self._after, None
        if before is not None:
            before.stop()
        self.renewals += 1
        if self._fail:
            raise self._fail.pop(0)
        answers = super().renew(renewals, within=within)
        if after is not None:
            after.stop()
        for gate in filter(None, (before, after)):
            # A moment later the thread is done with what it does with the answer.
            _when_done(gate._passed.set)
        return answers

    def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        gate, self._beat = self._beat, None
        if gate is not None:
            gate.stop()
        answers = super().heartbeat(renewals, within=within)
        if gate is not None:
            _when_done(gate._passed.set)
        return answers


def _when_done(call: Callable[[], None]) -> None:
    timer: Any = threading.Timer(0.1, call)
    timer.daemon = True
    timer.start()


def gated(url: str, namespace: str) -> tuple[Runs, GatedStore]:
    backend = GatedStore(url, namespace)
    return Runs(Engine(backend)), backend
