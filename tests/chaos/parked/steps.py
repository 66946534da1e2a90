"""The steps of a run at which a campaign kills, by wrapping the library in the worker.

A campaign lays a fault at a step; the next process that passes there takes it up, writes it down,
and suffers it. Nothing in the library knows of this.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import redis
from celery.signals import task_postrun, worker_init

from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.engine.engine import Engine
from celery_relock.engine.protocol import Held, Parked
from celery_relock.worker.parking import Outbox
from tests.support import Journal

#: In the order in which a run that has to wait comes by, twice by the first.
ARRIVED = "before it asks"
PARKED = "after park, before ack"
BEFORE_SEND = "between release and send"
SENT = "after send"
GRANTED = "after grant"
MID_RUN = "mid-run"
RELEASED = "after release, before the result"
STORED = "after the result, before ack"
STEPS = (ARRIVED, PARKED, BEFORE_SEND, SENT, GRANTED, MID_RUN, RELEASED, STORED)

#: A pool's child; the main process alone, its children live on for a while; all of them at once.
CHILD, MAIN, WORKER = "child", "main process", "whole worker"
#: Not a kill: what was to be sent never reaches the broker, and nobody is told.
MESSAGE = "message lost"


def fault_key(step: str) -> str:
    """Where a campaign lays the fault of a step, on the resource's server."""
    return f"fault:{step}"


class Steps:
    """Kills whoever passes a step that has a fault laid."""

    def __init__(self, client: redis.Redis, journal: Journal) -> None:
        self._client, self._journal = client, journal
        self._main = 0

    def install(self) -> None:
        """In a worker's main process, before its pool forks."""
        self._main = os.getpid()
        self._wrap_engine()
        self._wrap_sender()
        task_postrun.connect(self._after_run, weak=False)

    def at(self, step: str) -> str | None:
        """Pass a step. Returns a fault that the caller has to act out itself."""
        fault = self._client.getdel(fault_key(step))
        if fault is None:
            return None
        victim = str(fault.decode())
        self._journal.add("fault", step=step, victim=victim, main=self._main)
        if victim == MESSAGE:
            return victim
        if victim == WORKER:
            os.killpg(os.getpgid(self._main), signal.SIGKILL)
        os.kill(os.getpid() if victim == CHILD else self._main, signal.SIGKILL)
        return None

    def _wrap_engine(self) -> None:
        arrive, release = Engine.acquire, Engine.release
        acquire, park = RedisBackend.acquire, RedisBackend.park

        def arriving(engine: Any, lease: Any, *args: Any, **kwargs: Any) -> Any:
            self._journal.add("arrived", task=lease.work.id, main=self._main)
            self.at(ARRIVED)
            return arrive(engine, lease, *args, **kwargs)

        # In the store: nothing has been done yet with what the server said.
        def acquiring(backend: Any, *args: Any, **kwargs: Any) -> Any:
            return self._answered(acquire(backend, *args, **kwargs))

        def parking(backend: Any, *args: Any, **kwargs: Any) -> Any:
            return self._answered(park(backend, *args, **kwargs))

        def releasing(engine: Any, lease: Any, **kwargs: Any) -> Any:
            held = bool(lease.fences)
            answer = release(engine, lease, **kwargs)
            if held:
                self.at(RELEASED)
            return answer

        _replace(Engine, acquire=arriving, release=releasing)
        _replace(RedisBackend, acquire=acquiring, park=parking)

    def _answered(self, answer: Any) -> Any:
        if isinstance(answer, Held | Parked):
            self.at(GRANTED if isinstance(answer, Held) else PARKED)
        return answer

    def _wrap_sender(self) -> None:
        send = Outbox.send

        def sending(sender: Any, message: Any) -> None:
            if self.at(BEFORE_SEND) != MESSAGE:
                send(sender, message)
            self.at(SENT)

        _replace(Outbox, send=sending)

    def _after_run(self, task_id: str = "", state: str = "", **_: Any) -> None:
        self._journal.add("over", task=task_id, state=state)
        if state == "SUCCESS":
            self.at(STORED)


def _replace(owner: type, **functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        setattr(owner, name, function)


def install_at_start(steps: Steps) -> None:
    """Wrap the library when a worker starts, not in who only sends."""
    worker_init.connect(lambda **_: steps.install(), weak=False)
