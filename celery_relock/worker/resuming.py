"""A worker sends parked messages on, whoever was to do it and has died.

Normally whoever gives a lock back sends the next message itself. Every worker's main process looks
as well: when somebody calls who could not send (another app, a plain `Lock`), when a lease that
stood in the way has ended, when a message that was sent did not arrive, when the time to wait is
over. There is no leader and no beat: the first to look gets the message.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from celery.signals import task_revoked

from ..engine import ids
from ..engine.engine import Engine
from ..engine.protocol import Notice
from ..engine.renewal import Outage
from ..errors import RelockError
from . import headers

logger = logging.getLogger("celery_relock")

# How often a worker looks for itself, in seconds; when something is known to be due sooner, then.
LOOK_EVERY = 1.0


class Forwarder:
    """Looks after the parked messages of one app.

    Args:
        engine: of the app's locks; its sender sends them.
    """

    def __init__(self, engine: Engine) -> None:
        # Not at the top: whoever only sends tasks shall not load the worker.
        from celery.worker.state import revoked

        self._engine = engine
        self._all_revoked = revoked
        self._bell = threading.Event()
        self._stopped = False
        self._revoked: set[str] = set()
        self._over: deque[str] = deque()

    def start(self) -> None:
        """Begin; the first look sends on what was left by whoever was here before."""
        task_revoked.connect(self._discard, weak=False, dispatch_uid="celery_relock.resuming")
        for target in (self._live, self._listen):
            threading.Thread(target=target, name="relock-forwarder", daemon=True).start()

    def stop(self) -> None:
        task_revoked.disconnect(dispatch_uid="celery_relock.resuming")
        self._stopped = True
        self._bell.set()

    def _discard(self, request: Any = None, **_: Any) -> None:
        """A run was revoked or has expired: if it was parked, its place is free."""
        self._over.append(headers.read(request).execution_id)
        self._bell.set()

    def _live(self) -> None:
        for warning in self._warnings():
            logger.warning(warning)
        outage = Outage("parked runs cannot be looked for")
        while not self._stopped:
            pause = LOOK_EVERY * ids.chance.uniform(0.8, 1.2)  # not all workers at once
            with outage:
                due = self._look()
                pause = pause if due is None else min(pause, due)
            self._bell.wait(pause)
            self._bell.clear()

    def _look(self) -> float | None:
        while self._over:
            self._engine.parking.withdraw(self._over[0])
            self._over.popleft()
        # Celery finds out that a task is revoked when a worker receives it, so it is sent there.
        revoked = set(self._all_revoked)
        new = revoked - self._revoked
        due = self._engine.parking.resume([ids.short(task) for task in new])
        self._revoked = revoked
        return due

    def _listen(self) -> None:
        while not self._stopped:
            try:
                self._engine.backend.listen("parked", self._bell.set, self._hear)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is tried again
                logger.debug("the forwarder does not hear, it looks by itself: %s", error)
                time.sleep(LOOK_EVERY)

    def _hear(self, notice: Notice) -> None:
        if notice.attempt_id == self._engine.parking.home:
            self._bell.set()

    def _warnings(self) -> list[str]:
        try:
            return self._engine.backend.dangers()
        except RelockError:
            return []  # who cannot reach it hears of that soon enough
