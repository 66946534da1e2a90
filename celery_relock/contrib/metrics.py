"""The metrics of locks, for any collector, built on `celery_relock.signals`.

Every instrument is defined here once; `prometheus` and `otel` hand it to their systems. The labels
are the task's name and, if wanted, the template of its `lock_key`. A lock name is never a label:
there can be as many names as accounts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from celery import current_app

from .. import signals
from ..declaration import declaration, is_lockable
from ..engine.events import logger
from ..errors import RelockError

#: Records a measurement: the instrument, a number or seconds, and the labels.
Record: TypeAlias = Callable[[str, float, Mapping[str, str]], None]


class Instrument(NamedTuple):
    """Something that is measured.

    Attributes:
        about: a sentence for people.
        labels: the labels besides those of the task.
    """

    about: str
    labels: tuple[str, ...] = ()


# A name is in one of these tables: a meter and a registry can have them side by side.
COUNTERS = {
    "acquired": Instrument("Locks acquired"),
    "reentered": Instrument("Locks re-entered by calls, or by executions that joined a permit"),
    "conflicts": Instrument(
        "Executions that met a held lock, by what happened to them: block, wait, retry, drop, "
        "raise, or duplicate for a second copy of a message",
        ("policy",),
    ),
    "parkings": Instrument("Messages parked in Redis"),
    "resumed": Instrument("Parked messages published again"),
    "dropped": Instrument(
        "Executions that ended without running their body because the lock was held"
    ),
    "duplicates": Instrument("Calls that lock_dedup did not send"),
    "lost": Instrument("Locks that ended before their work did"),
    "unavailable": Instrument(
        "Executions for whose locks Redis could not be reached, by what happened to them: raise, "
        "retry (one for each try) or run",
        ("policy",),
    ),
    "unprotected": Instrument("Executions that ran without their locks (lock_on_unavailable)"),
    "reclaimed": Instrument("Locks released for processes that had died"),
    "forced": Instrument(
        "Locks released by force, and parked tasks cancelled, by this process", ("action",)
    ),
    "renewal_failures": Instrument("Renewals that did not reach Redis, one for each execution"),
}
HISTOGRAMS = {
    "wait": Instrument("Seconds for which an execution waited for its lock, also in vain"),
    "hold": Instrument("Seconds for which an execution held its lock"),
}
#: Read from Redis, by one process for all (`celery relock exporter`).
GAUGES = {
    "held": "Locks that are held",
    "holders": "Holds: an execution that holds several locks has one for each",
    "waiting": "Places in queues of executions that wait in a worker slot, or in another process",
    "parked": "Places in queues of executions that wait in Redis",
    "oldest_wait": "Seconds that the longest-waiting first execution of a queue has waited",
    "oldest_hold": "Seconds for which the lock that was held longest has been held",
    "markers": "Calls that lock_dedup knows to be queued or running",
    "bursts": "Bursts of calls that lock_debounce keeps until no more calls come",
}
#: The histograms and gauges that are in seconds.
SECONDS = (*HISTOGRAMS, "oldest_wait", "oldest_hold")
#: Upper bounds of the histograms' buckets, in seconds.
BOUNDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)

# Seconds for which the gauges are not read again.
FRESH = 2.0


# The measurements of one signal: instrument, a number or seconds, further labels.
_Measured: TypeAlias = Iterator[tuple[str, float, dict[str, str]]]


def connect(by: str, record: Record, templates: bool = False) -> None:
    """Measure from now on, in this process and in its forked children.

    Args:
        by: who measures. A second call with the same text has no effect.
        record: called for each measurement, in the thread where it arises.
        templates: whether the template of the task's `lock_key` is also a label.
    """

    def receiver(rule: Callable[..., _Measured]) -> Callable[..., None]:
        def receive(sender: Any = None, task_name: str = "", **told: Any) -> None:
            labels = {"task": task_name or getattr(sender, "name", "")}
            if templates:
                # The lock of a dead process comes with the task's name alone.
                labels["key"] = template_of(sender or current_app.tasks.get(task_name))
            for name, value, more in rule(**told):
                record(name, value, {**labels, **more})

        return receive

    uid = f"celery_relock.metrics.{by}"
    for signal, rule in _RULES.items():
        signal.connect(receiver(rule), weak=False, dispatch_uid=uid)


def _counts(name: str, **labels: str) -> Callable[..., _Measured]:
    """Counts one, with these labels, or with those of its signal."""

    def rule(**told: Any) -> _Measured:
        yield name, 1, labels or {label: told[label] for label in COUNTERS[name].labels}

    return rule


# Without a fencing token there is no lock (`relock_enabled=False`), and nothing to count.


def _acquired(fence: int, waited: float, reentered: bool, **_: Any) -> _Measured:
    if fence:
        yield ("reentered" if reentered else "acquired"), 1, {}
        if not reentered:
            yield "wait", waited, {}


def _reentered(fence: int, **_: Any) -> _Measured:
    if fence:
        yield "reentered", 1, {}


def _conflict(policy: str, waited: float, **_: Any) -> _Measured:
    if policy != "block":  # counted when its wait began; now the wait is over
        yield "conflicts", 1, {"policy": policy}
    if waited and policy in ("block", "raise"):
        yield "wait", waited, {}


def _released(fence: int, held: float, reentered: bool, of_workflow: bool, **_: Any) -> _Measured:
    # The last step of a workflow has re-entered the lock if it came before the step before ended.
    if fence and (of_workflow or not reentered):
        yield "hold", held, {}


def _lost(held: float, **_: Any) -> _Measured:
    yield "lost", 1, {}
    if held:
        yield "hold", held, {}


_RULES: dict[Any, Callable[..., _Measured]] = {
    signals.lock_acquired: _acquired,
    signals.lock_reentered: _reentered,
    signals.lock_conflict: _conflict,
    signals.lock_waiting: _counts("conflicts", policy="block"),
    signals.lock_parked: _counts("parkings"),
    signals.lock_resumed: _counts("resumed"),
    signals.lock_dropped: _counts("dropped"),
    signals.lock_duplicate: _counts("duplicates"),
    signals.lock_released: _released,
    signals.lock_lost: _lost,
    signals.lock_unavailable: _counts("unavailable"),
    signals.lock_unprotected: _counts("unprotected"),
    signals.lock_reclaimed: _counts("reclaimed"),
    signals.lock_forced: _counts("forced"),
    signals.lock_unrenewed: _counts("renewal_failures"),
}


def template_of(task: Any) -> str:
    """The template of a task's lock names: few, while names are many. "" outside of tasks, and for
    the default, the task's name with all its arguments."""
    # As declared: the key can also be the app's `relock_key`.
    parts = declaration(type(task)).options.parts if is_lockable(task) else []
    return ", ".join(
        part if isinstance(part, str) else getattr(part, "__name__", "callable")
        for part in parts
        if part is not None and part is not False
    )


class Figures:
    """The gauges, read from Redis. Use it in one process: each read scans all keys of the database.

    Args:
        locks: a `celery_relock.admin.Locks`.

    Attributes:
        took: seconds that the last read took.
    """

    def __init__(self, locks: Any) -> None:
        self.took = 0.0
        self._locks = locks
        self._guard = threading.Lock()
        self._read_at = -FRESH
        self._found: dict[str, float] | None = None

    def read(self) -> dict[str, float] | None:
        """The gauges by name; None if Redis cannot be reached or refuses."""
        with self._guard:
            now = time.monotonic()
            if now - self._read_at >= FRESH:
                try:
                    found = self._locks.stats()
                except RelockError as error:
                    self._found = None
                    logger.warning("Cannot count the locks: %s", error)
                else:
                    self._found = {name: float(getattr(found, name)) for name in GAUGES}
                    self._found["waiting"] -= found.parked
                self._read_at = time.monotonic()
                self.took = self._read_at - now
            return self._found
