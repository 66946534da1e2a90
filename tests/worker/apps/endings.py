"""Tasks that end in every way there is.

Each body is there four times over, with and without a lock, acknowledged early and late, under
the names `<body>_<early|late>_<locked|plain>`. What Celery makes of an ending is what the plain
one shows; the locked one must not differ.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from celery.exceptions import Ignore, Reject
from celery.signals import celeryd_init, task_postrun

from celery_relock import LockedTask
from celery_relock.worker import conflict
from tests.support import Journal, make_app
from tests.support.endings import LIMIT
from tests.support.fenced import Fenced

KEY = "{account}"
# Longer than any test: what is free earlier has been released or reclaimed.
LONG = 120

app = make_app(__name__, worker_prefetch_multiplier=1, worker_max_tasks_per_child=None)
app.conf.update(json.loads(os.environ.get("RELOCK_TEST_SETTINGS", "{}")))
app.conf.broker_transport_options = {
    **app.conf.broker_transport_options,
    **json.loads(os.environ.get("RELOCK_TEST_TRANSPORT", "{}")),
}
journal, register = Journal.from_env(), Fenced.from_env()


@celeryd_init.connect(weak=False)
def copies(**_: Any) -> None:
    """For how many seconds this worker looks whether the execution before a copy has ended."""
    conflict._STORING = float(os.environ.get("RELOCK_TEST_STORING", conflict._STORING))


def ending(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a body in all its forms."""

    def declare(body: Callable[..., Any]) -> Callable[..., Any]:
        for ack in ("early", "late"):
            name = f"{body.__name__}_{ack}"
            common = {"bind": True, "acks_late": ack == "late", **options}
            locked = {"lock_ttl": LONG, **common, "base": LockedTask, "lock_key": KEY}
            plain = {key: value for key, value in common.items() if key[:5] != "lock_"}
            app.task(body, name=f"{name}_locked", **locked)
            app.task(body, name=f"{name}_plain", **plain)
        return body

    return declare


def begin(self: Any, account: str) -> tuple[int, int]:
    """The body has begun. Returns how often it has now, and the fence it touches the register
    with, 0 without a lock."""
    fence = self.lock.fence if isinstance(self, LockedTask) else 0
    times = register.begun(account)
    journal.add("inside", account=account, fence=fence, id=self.request.id)
    register.touch(account, fence)
    return times, fence


def go(self: Any, account: str) -> bool:
    """Begin, and go on when the test says so. True the first time; a later run does not wait."""
    times, fence = begin(self, account)
    if times == 1:
        register.wait_for_go(account)
    register.touch(account, fence)
    journal.add("ending", account=account)
    return times == 1


def stay(self: Any, account: str) -> str:
    """Work until something from outside makes an end of it; a later run ends by itself."""
    times, fence = begin(self, account)
    while times == 1 and not _touched_till_now(account, fence):
        time.sleep(0.05)
    journal.add("ending", account=account)
    return account


def _touched_till_now(account: str, fence: int) -> bool:
    """Touch, and see whether the body may go. What a soft limit raises amid redis-py's own metrics
    is swallowed there (`redis.observability.recorder`, in 8.1), so it has to strike later."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        register.touch(account, fence)
        return register.may_go(account)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


@ending()
def returns(self: Any, account: str) -> str:
    go(self, account)
    return account


@ending(lock_on_conflict="block")
def blocks(self: Any, account: str) -> str:
    return stay(self, account)


@ending()
def raises(self: Any, account: str) -> None:
    go(self, account)
    raise ValueError(account)


# Celery sends the message, then stores RETRY: that would replace the end of a quicker retry.
@ending(max_retries=1)
def retries(self: Any, account: str) -> str:
    if go(self, account):
        raise self.retry(countdown=1)
    return account


@ending(autoretry_for=(KeyError,), max_retries=1, retry_backoff=False, default_retry_delay=1)
def retries_by_itself(self: Any, account: str) -> str:
    if go(self, account):
        raise KeyError(account)
    return account


@ending()
def ignores(self: Any, account: str) -> None:
    go(self, account)
    raise Ignore


@ending()
def rejects(self: Any, account: str) -> None:
    go(self, account)
    raise Reject("not wanted", requeue=False)


@ending()
def goes_back(self: Any, account: str) -> str:
    if go(self, account):
        raise Reject("come again", requeue=True)
    return account


@ending()
def is_replaced(self: Any, account: str) -> None:
    go(self, account)
    raise self.replace(other.si(account))


@app.task
def other(account: str) -> str:
    return account


@ending()
def exits(self: Any, account: str) -> None:
    go(self, account)
    sys.exit(3)


@ending()
def stays(self: Any, account: str) -> str:
    return stay(self, account)


@ending()
def stays_until_it_is_told_of(self: Any, account: str) -> str:
    """A later run ends when Celery has told that the first was lost. It looks for a success, and
    then stores the failure: a success between them would be lost."""
    stay(self, account)
    journal.wait_for("errback", 30, account=account)
    return account


@ending(lock_ttl=2)
def stays_briefly(self: Any, account: str) -> str:
    return stay(self, account)


@ending(reject_on_worker_lost=True)
def stays_or_comes_back(self: Any, account: str) -> str:
    return stay(self, account)


@ending(retry_on_worker_lost=True, default_retry_delay=0.2)
def stays_or_is_sent_again(self: Any, account: str) -> str:
    return stay(self, account)


@ending(soft_time_limit=LIMIT)
def overruns_softly(self: Any, account: str) -> str:
    return stay(self, account)


@ending(time_limit=LIMIT)
def overruns(self: Any, account: str) -> str:
    """Does not go when it is asked to, so it lives on beside what Celery does about its end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return stay(self, account)


@ending(time_limit=LIMIT, acks_on_failure_or_timeout=False)
def overruns_again(self: Any, account: str) -> str:
    return stay(self, account)


@ending(time_limit=LIMIT)
def overruns_in_its_pool(self: Any, account: str) -> str:
    return stay(self, account)


@ending()
def runs_out_of_memory(self: Any, account: str) -> str:
    if go(self, account):
        raise MemoryError(account)
    return account


@app.task
def then(account: str) -> str:
    journal.add("next", account=account)
    return account


@app.task
def failed(account: str) -> str:
    journal.add("errback", account=account)
    return account


@task_postrun.connect
def over(args: Any = (), state: Any = None, **_: Any) -> None:
    """In the child at once after the body, whatever it raised."""
    if args:
        journal.add("over", account=args[0], state=state)
