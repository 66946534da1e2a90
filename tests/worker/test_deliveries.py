"""What fires when a message of a locked task is delivered is what docs/company.md says."""

from __future__ import annotations

import re
import uuid

import pytest

from tests.support import wait_for
from tests.support.messages import Message
from tests.support.parked import lock_of
from tests.support.worker import ROOT

APP = "tests.worker.apps.deliveries"
PAGE = (ROOT / "docs" / "company.md").read_text()


@pytest.fixture(scope="module")
def worker(module_worker):
    return module_worker(APP, concurrency=2, arguments=("-E",))


def row(delivery):
    """What the page says of a delivery: the signals and hooks in their order, and the events."""
    _, fires, events = PAGE.split(f"\n**{delivery}**\n")[1].split("\n- ", 2)
    events = events.split("\n\n")[0]
    return re.findall(r"`([\w-]+)`", fires), sorted(re.findall(r"`([\w-]+)`", events))


class Fired:
    """What fires for one task, delivery by delivery."""

    def __init__(self, worker, monitor, task_id):
        self.worker, self.monitor, self.task_id = worker, monitor, task_id
        self._fired = self._heard = 0

    def next(self, delivery, last="task_postrun"):
        """The next delivery, up to the `last` signal, is as the page says of it."""
        signals, events = row(delivery)

        def fired(journal):
            of_task = [e["what"] for e in journal if e.name == "fires" and e["id"] == self.task_id]
            if "before_task_publish" in of_task and "after_task_publish" in of_task:
                # The worker may have it before its sender says that it is sent.
                of_task.remove("after_task_publish")
                of_task.insert(of_task.index("before_task_publish") + 1, "after_task_publish")
            since = of_task[self._fired :]
            return since[: since.index(last) + 1] if last in since else []

        found = fired(self.worker.journal.wait_for(lambda journal: bool(fired(journal))))
        self._fired += len(found)
        if "lock_resumed" in found:  # by another process, at any moment
            found.remove("lock_resumed")
            found.insert(0, "lock_resumed")
        assert found == signals
        self._heard += len(events)
        wait_for(lambda: len(self._events()) >= self._heard, what=f"{len(events)} events")
        assert sorted(self._events()[self._heard - len(events) : self._heard]) == events

    def _events(self):
        return [event["type"] for event in self.monitor.of(self.task_id)]


def test_a_task_that_has_to_wait_is_delivered_twice(worker, monitor):
    key = uuid.uuid4().hex
    worker.journal.add("gate", key=key)
    with lock_of(worker, key):
        sent = worker.module.work.delay(key)
        fired = Fired(worker, monitor, sent.id)
        fired.next("sent", "after_task_publish")
        fired.next("its lock is held: it is parked")
    fired.next("its turn has come: it is resumed")


def test_a_copy_is_delivered_and_no_body_runs(worker, monitor):
    message = Message(worker, worker.module.work)
    fired = Fired(worker, monitor, message.id)
    message.deliver()
    fired.next("its lock is free: it runs", "body")
    message.deliver()
    fired.next("a copy while it runs")
    worker.journal.add("gate", key=message.account)
    fired.next("it ends")
    message.deliver()
    fired.next("a copy after it has ended")
