"""Tasks that are parked, and what can be killed or cut off meanwhile."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from celery.signals import worker_init
from kombu import Queue

from celery_relock import LockedTask
from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.declaration import engine_of
from celery_relock.engine.engine import Engine
from celery_relock.worker.parking import Outbox
from tests.support import Journal, make_app
from tests.support.without_broker import WithoutABroker

KEY = "account:{account}"

app = make_app(__name__, task_publish_retry_policy={"max_retries": 1, "interval_start": 0.05})
app.conf.task_queues = [Queue(app.conf.task_default_queue), Queue("quiet")]
journal = Journal.from_env()


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def hold(self, account):
    """Holds the lock until the test says that it may go."""
    journal.add("held", account=account)
    journal.wait_for(f"free {account}", 30)


def take(self: Any, account: str) -> str:
    journal.add("took", account=account, id=self.request.id)
    return "ran"


takes = app.task(name="takes", base=LockedTask, bind=True, lock_key=KEY)(take)


@app.task(base=LockedTask, bind=True, lock_key=KEY, soft_time_limit=1)
def is_limited_while_parking(self, account):
    journal.add("took", account=account, id=self.request.id)


class ToldOf(LockedTask):
    """Says when its message arrives, and then waits for the test."""

    def before_start(self, task_id, args, kwargs):
        journal.add("arrived", account=args[0])
        times = len(journal.events("arrived", account=args[0]))
        if times > 1:
            journal.wait_for(f"go {args[0]}", 30)


def cut_off(policy: str) -> Any:
    options = {"base": ToldOf, "bind": True, "lock_key": KEY, "lock_on_unavailable": policy}
    return app.task(name=f"cut_off.{policy}", **options)(take)


finds_redis_away = {policy: cut_off(policy) for policy in ("raise", "retry", "run")}


class KnowsItsBroker(WithoutABroker):
    """Where it sends to is known by the time when the broker is away, as it is in real life."""

    def before_start(self, *told):
        assert engine_of(self.app).parking.sender.homes
        super().before_start(*told)


@app.task(base=KnowsItsBroker, bind=True, lock_key=KEY)
def holds_without_a_broker(self, account):
    journal.add("held", account=account)
    journal.wait_for(f"free {account}", 30)


_send, _park, _ask_to_park = Outbox.send, Engine.park, RedisBackend.park


def _dies_before_it_sends(self: Any, message: Any) -> None:
    if "killer" in message.name and not journal.events("killed"):
        journal.add("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    _send(self, message)


def _takes_long_to_park(self: Engine, lease: Any, park_request: Any) -> Any:
    answer = _park(self, lease, park_request)
    if "limited" in lease.claim.names[0]:
        journal.add("parked")
        time.sleep(10)
    return answer


def _dies_when_it_is_parked(self: RedisBackend, claim: Any, *args: Any) -> Any:
    answer = _ask_to_park(self, claim, *args)
    if "unheard" in claim.names[0] and not journal.events("died"):
        journal.add("died")
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


@worker_init.connect
def _break(**_: Any) -> None:
    """In the worker alone, not in the test process."""
    Outbox.send = _dies_before_it_sends  # type: ignore[method-assign]
    RedisBackend.park = _dies_when_it_is_parked  # type: ignore[method-assign]
    Engine.park = _takes_long_to_park  # type: ignore[method-assign]
