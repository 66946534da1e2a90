"""A workflow under test: steps that tell what they do, under the lock of one account."""

from __future__ import annotations

import uuid

from celery.canvas import StampingVisitor

from tests.support import wait_for
from tests.support.parked import lock_of


class Flow:
    def __init__(self, worker):
        self.worker = worker
        self.module = worker.module
        self.account = uuid.uuid4().hex[:12]
        self.key = f"account:{self.account}"

    def step(self, name, do="", task=None):
        return (task or self.module.plain).s(account=self.account, name=name, do=do)

    def join(self, name):
        return self.module.joined.s(account=self.account, name=name)

    def lock(self, name=""):
        return lock_of(self.worker, name or self.key)

    def mine(self, events, *names):
        """Those of this workflow, by default all."""
        mine = [e for e in events if e.data.get("account") == self.account]
        return [e for e in mine if not names or e.name in names]

    def events(self, *names):
        return self.mine(self.worker.journal.events(), *names)

    def wait_for(self, *steps, event="enter"):
        """Until these steps have begun, or have come to another event."""
        self.worker.journal.wait_for(
            lambda events: {e["step"] for e in self.mine(events, event)} >= {*steps}
        )

    def go_on(self):
        """Let the steps go on that wait to be told to."""
        self.worker.journal.add(f"go on {self.account}")

    def is_free(self):
        lock = self.lock()
        if lock.acquire(blocking_timeout=20):
            lock.release()
            return True
        return False


def wait_for_state(result, state):
    wait_for(lambda: result.state == state, what=f"the state {state}")


class Visitor(StampingVisitor):
    """Writes a stamp of the user on each step."""

    def on_signature(self, sig, **headers):
        return {"mine": "yes", "stamped_headers": ["mine"]}
