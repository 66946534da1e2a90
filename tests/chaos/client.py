"""One process of a campaign: threads that take locks, work, and write down what they see.

    python -m tests.chaos.client '{"url": …, "register": …, …}'

The settings are those of `Settings`; it ends by itself.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from celery_relock.engine import events
from celery_relock.engine.platform import clock
from celery_relock.errors import LockLost, LockUnavailable
from celery_relock.lock import Lock
from tests.chaos.history import Recorder
from tests.chaos.register import KINDS, Register

#: Name and limit. Each thread is an owner of its own, except under "team": two owners in all.
LOCKS = {"stock": 1, "till": 1, "nested": 1, "team": 1, "pool": 2, "ledger": 1}
#: The locks that some visits share, and how many of the visits do.
SHARED, SHARE = ("ledger",), 0.7
#: The locks whose holders have a register to themselves.
GUARDED = ("stock", "till", "nested", "ledger")
#: How long a thread waits for a lock once the faults have ended.
PATIENCE = 20.0


@dataclass(frozen=True)
class Settings:
    """What a campaign tells its processes. `until`: the monotonic time at which the faults end."""

    url: str
    register: str
    namespace: str
    folder: str
    until: float
    lease: float
    threads: int
    name: str

    def arguments(self) -> list[str]:
        return ["tests.chaos.client", json.dumps(asdict(self))]


_told = threading.local()


def _note(event: events.LockEvent) -> None:
    setattr(_told, event.kind, time.monotonic())


events.subscribe(_note, {"acquired", "waiting"})


class Visitor(threading.Thread):
    """One thread: visits locks at random until the faults end, then each of them once more."""

    def __init__(self, settings: Settings, recorder: Recorder, number: int) -> None:
        super().__init__(name=f"{settings.name}.{number}")
        self._settings = settings
        self._recorder = recorder
        self._register = Register(settings.register)
        self._team = f"team-{number % 2}"
        self._random = random.Random(self.name)
        self._visits = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while time.monotonic() < self._settings.until:
                wait = self._random.choice((0.0, 0.3, 3.0, 3.0))
                self._visit(self._random.choice([*LOCKS, *SHARED]), wait)
                time.sleep(self._random.uniform(0, 0.01))
            for name in LOCKS:
                if not self._visit(name, PATIENCE):
                    raise AssertionError(f"{self.name} did not get {name!r} in {PATIENCE} s")
        except BaseException as error:
            self.failure = error
            raise

    def _visit(self, name: str, wait: float, inner: bool = False) -> bool:
        owner = self._team if name == "team" else self.name
        shared = name in SHARED and self._random.random() < SHARE
        lock = Lock(
            self._settings.url,
            name,
            timeout=self._settings.lease,
            blocking_timeout=wait,
            limit=LOCKS[name],
            owner=owner if name in ("team", "nested") else None,
            namespace=self._settings.namespace,
            mode="shared" if shared else "exclusive",
        )
        self._visits += 1
        visit = f"{self.name}.{self._visits}"
        facts = {"id": visit, "lock": name, "owner": owner, "limit": LOCKS[name]}
        self._recorder.write("ask", **facts, shared=shared)
        _told.waiting = None
        try:
            entered = lock.acquire()
        except LockUnavailable:
            return False  # the server may have let it in: its outcome stays unknown
        lease = lock._lease
        if not entered:
            self._recorder.write("refused", id=visit)
            return False
        # By the clock of the record.
        until = None if lease is None else lease.deadline - clock() + time.monotonic()
        told = {"told": _told.acquired, "queued": _told.waiting}
        self._recorder.write("in", id=visit, fence=lock.fence, until=until, **told)
        self._look(visit, lock)
        try:
            self._work(visit, name, lock, inner, shared)
        finally:
            self._leave(visit, lock)
        return True

    def _work(self, visit: str, name: str, lock: Lock, inner: bool, shared: bool) -> None:
        if name == "nested" and not inner:
            self._visit(name, 1.0, inner=True)
        fence = lock.fence
        seen = {}
        if name in GUARDED and not shared:
            seen = {kind: self._register.read(kind, name, fence) for kind in KINDS}
        # Mostly short, now and then long enough to need a renewal.
        renewed = self._random.random() < 0.05
        longest = self._settings.lease * 1.3 if renewed else self._random.choice((0.005, 0.02, 0.1))
        time.sleep(self._random.uniform(0, longest))
        lost = self._look(visit, lock)
        for kind, value in seen.items():
            if value is not None and not (lost and kind == "checked"):
                self._register.write(kind, name, fence, value, f"{visit}-{os.getpid()}")

    def _look(self, visit: str, lock: Lock) -> bool:
        # The time before the look: it held then if it says that it holds now.
        now = time.monotonic()
        lost = lock.lost
        if not lost:
            self._recorder.write("trusted", now, id=visit)
        return lost

    def _leave(self, visit: str, lock: Lock) -> None:
        self._recorder.write("leave", id=visit)
        try:
            lock.release()
        except LockLost:
            outcome = "lost"
        except LockUnavailable:
            outcome = "unreleased"
        else:
            outcome = "released"
        self._recorder.write(outcome, id=visit)


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    recorder = Recorder(Path(settings.folder) / f"{settings.name}.jsonl")
    visitors = [Visitor(settings, recorder, number) for number in range(settings.threads)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    sys.exit(any(visitor.failure is not None for visitor in visitors))


if __name__ == "__main__":
    main()
