"""The workers' side of a campaign: one task that reads a register, thinks, and writes it."""

from __future__ import annotations

import random
import time
from typing import Any

import redis

from celery_relock import LockedTask
from tests.chaos.parked.settings import TASK, Settings
from tests.chaos.parked.steps import MID_RUN, Steps, install_at_start
from tests.chaos.register import Register
from tests.support import Journal

settings = Settings.from_environment()
app = settings.app()
journal = Journal(settings.resource, settings.namespace)
register = Register(settings.resource)
steps = Steps(redis.Redis.from_url(settings.resource), journal)
install_at_start(steps)


# A Redis that is started again may be away for longer than a command is repeated.
@app.task(name=TASK, base=LockedTask, bind=True, lock_key="{key}", lock_on_unavailable="retry")
def touch(self: Any, key: str) -> int:
    fence: int = self.lock.fence
    told = {"task": self.request.id, "lock": key, "fence": fence}
    journal.add("enter", **told)
    seen = register.read("fenced", key, fence)
    time.sleep(random.uniform(0, 0.005))
    steps.at(MID_RUN)
    time.sleep(random.uniform(0, 0.005))
    if seen is None or not register.write("fenced", key, fence, seen, self.request.id):
        journal.add("refused", **told)
    journal.add("leave", **told)
    return fence
