"""Tasks that read a register, think, and write it while the Redis of their locks is restarted."""

from __future__ import annotations

import os
import time
from typing import Any

from celery_relock import LockedTask
from tests.chaos.register import Register
from tests.support import Journal, make_app

app = make_app(__name__, worker_prefetch_multiplier=1)
journal = Journal.from_env()
register = Register(os.environ["RELOCK_TEST_URL"])


def touch(self: Any, account: str) -> None:
    fence = self.lock.fence
    told = {"task": self.request.id, "lock": account, "fence": fence}
    journal.add("enter", **told)
    seen = register.read("fenced", account, fence)
    time.sleep(0.05)
    if seen is None or not register.write("fenced", account, fence, seen, self.request.id):
        journal.add("refused", **told)
    journal.add("leave", **told)


def touches(policy: str) -> Any:
    return app.task(
        name=f"touches.{policy}",
        base=LockedTask,
        bind=True,
        lock_key="account:{account}",
        lock_on_conflict=policy,
        # Where a server takes longer to come back than a command is repeated.
        lock_on_unavailable="retry",
    )(touch)


parks, blocks = touches("wait"), touches("block")
