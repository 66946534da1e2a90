"""Tasks whose locks are watched: by monitors, and by receivers of this application's own."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from celery_relock import Lock, LockedTask, signals
from tests.support import Journal, make_app
from tests.support.without_broker import WithoutABroker

KEY = "account:{account}"

app = make_app(__name__, worker_prefetch_multiplier=1, task_send_sent_event=True)
journal = Journal.from_env()


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def works(self, account):
    return self.lock.fence


@app.task(base=LockedTask, bind=True, lock_key=KEY, send_events=False)
def works_unseen(self, account):
    return self.lock.fence


@app.task
def uses_a_lock(account):
    conf = app.conf
    with Lock(conf.relock_url, f"account:{account}", namespace=conf.relock_namespace) as lock:
        return lock.fence


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=1.5)
def holds(self, account, seconds=30.0):
    """Until the test says that it may go."""
    journal.add("held", account=account, fence=self.lock.fence)
    journal.wait_for(f"free {account}", seconds)
    return self.lock.fence


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="raise")
def raises(self, account):
    return self.lock.fence


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_max_parked=1)
def parks_one(self, account):
    return self.lock.fence


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="drop")
def drops(self, account):
    return self.lock.fence


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_on_conflict="block")
def blocks(self, account):
    return works(account)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_ttl=120.0)
def is_killed(self, account):
    journal.add("held", account=account)
    time.sleep(60)


@app.task(base=LockedTask, bind=True, lock_key=KEY, soft_time_limit=1)
def meets_a_slow_receiver(self, account):
    time.sleep(30)


@app.task(base=WithoutABroker, bind=True, lock_key=KEY)
def works_without_a_broker(self, account):
    return self.lock.fence


def _note(kind: str, sender: Any, told: dict[str, Any]) -> None:
    told.pop("signal")
    name = getattr(sender, "name", sender)
    journal.add(kind, sender=name, thread=threading.current_thread().name, by=os.getpid(), **told)


@signals.lock_acquired.connect
def acquired(sender=None, **told):
    _note("acquired", sender, told)


@signals.lock_conflict.connect
def conflict(sender=None, **told):
    _note("conflict", sender, told)


@signals.lock_released.connect
def released(sender=None, **told):
    _note("released", sender, told)


@signals.lock_lost.connect
def lost(sender=None, **told):
    _note("lost", sender, told)


@signals.lock_reclaimed.connect
def reclaimed(sender=None, **told):
    _note("reclaimed", sender, told)


@signals.lock_reentered.connect
def reentered(sender=None, **told):
    _note("reentered", sender, told)


@signals.lock_waiting.connect
def waiting(sender=None, **told):
    _note("waiting", sender, told)


@signals.lock_parked.connect
def parked(sender=None, **told):
    _note("parked", sender, told)


@signals.lock_resumed.connect
def resumed(sender=None, **told):
    _note("resumed", sender, told)


@signals.lock_dropped.connect
def dropped(sender=None, **told):
    _note("dropped", sender, told)


@signals.lock_acquired.connect(sender=works)
def of_one_task_alone(sender=None, names=(), **_):
    journal.add("of works alone", sender=sender.name, names=names)
    raise RuntimeError("this receiver is broken")


@signals.lock_acquired.connect(sender=meets_a_slow_receiver)
def is_slow(**_):
    try:
        time.sleep(30)
    except SoftTimeLimitExceeded:
        journal.add("cut short")
        raise
