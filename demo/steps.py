"""The four things that the demo shows, and what it checks of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from celery import chain

from celery_relock import Lock
from demo import tasks
from demo.checks import fences_increase, first_come_first_served, never_two, side_by_side
from demo.screen import Screen
from demo.timeline import Event

ACCOUNT = "account:42"


class Steps:
    """Attributes:
    failed: whether something that the demo says did not happen.
    """

    def __init__(self, screen: Screen) -> None:
        self.failed = False
        self._screen = screen
        self._events: list[Event] = []

    def wait_for_worker(self) -> None:
        next(event for event in tasks.timeline.follow(timeout=60) if event.what == "ready")
        tasks.timeline.skip()  # what was told in an earlier run, where the Redis is given

    def taking_turns(self) -> None:
        orders = {"order A": 42, "order B": 42, "order C": 7}
        self._screen.lanes({who: f"account {account}" for who, account in orders.items()})
        for who, account in orders.items():
            two = [task.si(account=account, who=who) for task in (tasks.reserve, tasks.charge)]
            chain(two * 2 if account == 42 else two).delay()
        events = list(self._watch(lambda: len(self._of("out")) == 10))
        self._finish()
        turns = [event.who[-1] for event in events if event.what == "in" and event.lock == ACCOUNT]
        self._check(
            first_come_first_served(events),
            f"they acquired the lock in the order in which they asked: {' '.join(turns)}",
        )
        self._check(side_by_side(events), "account 7 was in use beside account 42")

    def calling_a_locked_task(self) -> None:
        self._screen.lanes({"transfer": "", "fee": "called by transfer", "stranger": ""})
        tasks.transfer.delay(account=42, who="transfer", inner="fee")
        for event in self._watch(lambda: bool(self._of("out", "stranger"))):
            if event.who == "fee" and event.what == "in":
                tasks.charge.delay(account=42, who="stranger")
        self._finish()
        outer, inner = self._of("in", "transfer")[0], self._of("in", "fee")[0]
        self._check(
            inner.again and inner.fence == outer.fence,
            f"fee re-entered at once, with the same fencing token {inner.fence}",
        )
        self._check(
            self._of("out", "transfer")[0].at <= self._of("in", "stranger")[0].at,
            "the stranger acquired the lock when transfer, not only fee, had ended",
        )

    def failing(self) -> None:
        self._screen.lanes({"audit": "will fail", "next": ""})
        result = tasks.audit.delay(account=42, who="audit")
        for event in self._watch(lambda: bool(self._of("out", "next"))):
            if event.who == "audit" and event.what == "in":
                tasks.charge.delay(account=42, who="next")
        self._finish()
        free = max(self._of("fails")[0].at, self._of("asks", "next")[0].at)
        gap = self._of("in", "next")[0].at - free
        self._check(
            0 <= gap < 10, f"the next task acquired the lock {gap * 1000:.0f} ms after the failure"
        )
        error = result.get(timeout=10, propagate=False)
        self._check(isinstance(error, ValueError), f"the task failed as it would have: {error!r}")

    def dying(self) -> None:
        lease, kept = 2, False
        self._screen.lanes({"report": f"lease of {lease} s", "next": ""})
        tasks.report.delay(account=42, who="report")
        for event in self._watch(lambda: bool(self._of("out", "next"))):
            if event.who == "report" and event.what == "in":
                tasks.charge.delay(account=42, who="next")
                time.sleep(1.5 * lease)
                kept = Lock(tasks.URL, ACCOUNT).locked() and not self._of("in", "next")
                # By the worker, which may be on another host.
                victim = {"pid": event.pid, "who": "report", "lock": ACCOUNT}
                tasks.app.control.broadcast("kill_9", victim, destination=[event.node])
        self._finish()
        gap = self._of("in", "next")[0].at - self._of("killed")[0].at
        self._check(kept, f"after {1.5 * lease:g} s the lease of {lease} s was still renewed")
        self._check(0 < gap < lease + 3, f"the lock was free again {gap:.1f} s after the kill")

    def _watch(self, enough: Callable[[], bool]) -> Iterator[Event]:
        """Show the events of a step as they come, until there are enough of them."""
        self._events = []
        for event in tasks.timeline.follow(timeout=30):
            if event.what == "ready":  # one more worker
                continue
            self._events.append(event)
            self._screen.event(event)
            yield event
            if enough():
                return

    def _finish(self) -> None:
        self._screen.bars(self._events)
        self._check(never_two(self._events), "never two at once in one account")
        self._check(
            fences_increase(self._events), "each fencing token is higher than the one before"
        )

    def _of(self, what: str, who: str = "") -> list[Event]:
        return [event for event in self._events if event.what == what and who in ("", event.who)]

    def _check(self, good: bool, text: str) -> None:
        self._screen.verdict(good, text)
        self.failed = self.failed or not good
