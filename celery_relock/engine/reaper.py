"""Frees what dead processes of this host have left behind, as soon as they are dead.

A worker's main process runs one. It does not matter how a process died, or whether Celery noticed:
what counts is that it is gone. A child that is about to be killed (a hard time limit) is not gone
yet, and its lock is not freed under it.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from pathlib import Path

from ..errors import RelockError
from . import events, journal
from .engine import Engine
from .protocol import Successor

logger = logging.getLogger("celery_relock")

# How soon a process that has just begun to take locks is watched, in seconds.
LOOK_EVERY = 1.0
# For how long a claim that the dead had sent takes nothing any more, in seconds: it may come late.
REMEMBER_DEAD = 60.0
# When what nobody came for is thrown away, in seconds: all its leases have long ended.
FORGET_AFTER = 86_400.0


class Reaper:
    """Watches the processes of this host that hold locks of one store.

    Args:
        engine: whose locks to free; what other stores' locks are noted stays for their reapers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.backend
        self._watched: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; the first look frees what died before. Without journals it does nothing."""
        try:
            journal.folder()
        except OSError as error:
            logger.debug("no journals here, so leases free the locks of the dead: %s", error)
            return
        self._thread = threading.Thread(target=self._live, name="relock-reaper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End within a second."""
        self._stop.set()

    def _live(self) -> None:
        poll = select.poll()
        while not self._stop.is_set():
            try:
                self.look(poll)
                poll.poll(LOOK_EVERY * 1000)  # ends early when a process that is watched dies
            except Exception:
                logger.exception("the reaper failed and goes on")
                self._stop.wait(LOOK_EVERY)

    def look(self, poll: select.poll | None = None) -> int:
        """Free what the dead hold, and watch the living. Returns how many claims were freed."""
        freed = 0
        for path in journal.folder().iterdir():
            if journal.alive(path.name):
                if poll is not None and path.name not in self._watched:
                    self._watch(path.name, poll)
            else:
                self._unwatch(path.name, poll)
                freed += self._bury(path)
        return freed

    def _watch(self, name: str, poll: select.poll) -> None:
        try:
            self._watched[name] = os.pidfd_open(int(name.partition("-")[0]))
        except OSError:
            return  # gone this moment, or no pidfds here: the next look finds it
        poll.register(self._watched[name], select.POLLIN)

    def _unwatch(self, name: str, poll: select.poll | None) -> None:
        descriptor = self._watched.pop(name, None)
        if descriptor is not None:
            if poll is not None:
                poll.unregister(descriptor)
            os.close(descriptor)

    def _bury(self, path: Path) -> int:
        """Free what a dead process held, or leave it to its heirs. The journal goes when nothing in
        it is left to do."""
        freed, left = 0, 0
        for entry in journal.read(path):
            if entry.backend != self._store.id:
                left += 1
                continue
            try:
                had, messages = self._store.release(
                    entry.names,
                    entry.execution_id,
                    entry.attempt_id,
                    ended="killed",
                    remember=REMEMBER_DEAD,
                    home=self._engine.parking.home,
                    successor=Successor(entry.heirs, entry.keep) if entry.heirs else None,
                )
                self._engine.parking.forward(messages)
            except RelockError as error:
                logger.warning("cannot free %s of a dead process yet: %s", entry.names, error)
                left += 1
                continue
            if had:
                freed += 1
                _tell(entry, path.name.partition("-")[0])
        # What is left is another store's, whose reaper may never come.
        if not left or time.time() - path.stat().st_mtime > FORGET_AFTER:
            path.unlink(missing_ok=True)
        return freed


def _tell(entry: journal.Entry, process: str) -> None:
    reason = f"its holder, process {process} of this host, is dead (run {entry.execution_id})"
    work = events.Work(None, entry.task_name, entry.task_id)
    told = ("reclaimed", entry.names, entry.execution_id, entry.owner, 0, reason, 0.0, work)
    events.tell(events.LockEvent(*told))
