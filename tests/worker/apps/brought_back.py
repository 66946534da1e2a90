"""Tasks that end badly the first times, at a place that each of them names: before its body, in it,
after it, when its result is stored, or where a message is sent. The message is rejected then."""

from __future__ import annotations

import os
import signal
from typing import Any

import celery
from celery.exceptions import Reject
from kombu import Exchange, Queue

from celery_relock import LockedTask
from celery_relock.declaration import engine_of
from celery_relock.errors import LockConflict
from tests.support import Journal, make_app, wait_for

app = make_app(
    __name__,
    task_acks_late=True,
    task_acks_on_failure_or_timeout=False,
    worker_prefetch_multiplier=8,
)
journal = Journal.from_env()
resting = None
if app.conf.broker_url.startswith("amqp"):
    # What is rejected rests for a moment and is back then.
    NAME = app.conf.task_default_queue
    RESTS = f"{NAME}-rests"

    def _queue(name: str, to: str, **more: Any) -> Queue:
        back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": to, **more}
        return Queue(name, Exchange(""), routing_key=name, queue_arguments=back)

    app.conf.task_queues = [_queue(NAME, RESTS)]
    resting = _queue(RESTS, NAME, **{"x-message-ttl": 200})


def _fails(account: str) -> None:
    raise ConnectionError("not yet")


def _is_rejected(account: str) -> None:
    raise Reject("not yet", requeue=False)


def _is_put_back(account: str) -> None:
    raise Reject("not yet", requeue=True)


def _exits(account: str) -> None:
    raise SystemExit(1)


def _is_killed(account: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _returns_what_cannot_be_stored(account: str) -> object:
    return object()


def _waits(account: str) -> None:
    journal.wait_for(f"go {account}", 30)


def _waits_again(account: str) -> None:
    journal.wait_for(f"go again {account}", 30)


def _waits_and_is_killed(account: str) -> None:
    journal.wait_for(f"kill {account}", 30)
    _is_killed(account)


def _is_killed_when_all_is_made_up_for(account: str) -> None:
    wait_for(lambda: not engine_of(app).later._calls)
    _is_killed(account)


ENDS = {
    "": lambda account: None,
    "fails": _fails,
    "is rejected": _is_rejected,
    "is put back": _is_put_back,
    "exits": _exits,
    "is killed": _is_killed,
    "cannot be stored": _returns_what_cannot_be_stored,
    "waits": _waits,
    "waits again": _waits_again,
    "waits and is killed": _waits_and_is_killed,
    "is killed when all is made up for": _is_killed_when_all_is_made_up_for,
}


class Ends:
    """At each place: how it ends there the first time, the second time and so on; then it goes on.

    A place is an event of the journal, too. What is sent is sent by a worker.
    """

    before: tuple[str, ...] = ()
    began: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    sends_again: tuple[str, ...] = ()

    def end(self, place: str, account: str) -> object:
        journal.add(place, account=account, retries=self.request.retries)
        turn, ends = len(journal.events(place, account=account)), getattr(self, place)
        return ENDS[ends[turn - 1]](account) if turn <= len(ends) else None

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.end("before", args[0])

    def __call__(self, account: str) -> object:
        result = super().__call__(account)
        if self.after:
            self.end("after", account)
        return result

    def on_success(self, result: object, task_id: str, args: Any, kwargs: Any) -> None:
        if self.told:
            self.end("told", args[0])

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if celery.current_task:
            self.end("sends_again" if options.get("retries") else "sends", args[0])
        return super().apply_async(args, kwargs, **options)


class Locked(Ends, LockedTask):
    abstract = True
    lock_key = "account:{account}"


class Plain(Ends, celery.Task):
    abstract = True


class OfAWorkflow(Ends, LockedTask):
    """It needs no lock itself."""

    abstract = True
    lock_key = False


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"base": Plain},
    "locked": {"base": Locked},
    "ordered": {"base": Locked, "lock_order": "sent"},
    "of a workflow": {"base": OfAWorkflow},
}
# The broker gets it back at once.
PUT_BACK = {"acks_on_failure_or_timeout": True, "ignore_result": True}
LOST = {"reject_on_worker_lost": True, **PUT_BACK}
TASKS: dict[str, dict[str, Any]] = {
    "runs": {},
    "is acknowledged early": {"acks_late": False},
    "has a result that cannot be stored": {"began": 2 * ("cannot be stored",)},
    "fails in its own call": {"after": 2 * ("fails",)},
    "is rejected by its own call": {"after": 2 * ("is rejected",)},
    "has a retry that no broker takes": {
        "began": 2 * ("fails",),
        "sends_again": 2 * ("fails",),
        "autoretry_for": (ConnectionError,),
        "acks_on_failure_or_timeout": True,
    },
    "is put back by its own call": {"after": 2 * ("is put back",), **PUT_BACK},
    "exits in its own call": {"after": ("exits",), **LOST},
    "exits when its result is stored": {"told": ("exits",), **LOST, "ignore_result": False},
    "fails before it begins": {"before": ("fails",)},
    "fails before it begins, without a result": {"before": ("fails",), "ignore_result": True},
    "fails before it begins, where no autoretry is": {
        "before": ("fails",),
        "autoretry_for": (ConnectionError,),
    },
    "fails before it begins after a wait": {"before": ("", "fails")},
    "is put back before it begins": {
        "before": ("is put back",),
        "autoretry_for": (Exception,),
        **PUT_BACK,
    },
    "exits before it begins": {"before": ("exits",), **LOST},
    "is killed after its body": {"after": ("is killed",)},
    "fails and is killed after its body then": {
        "began": ("fails",),
        "after": ("is killed",),
        "reject_on_worker_lost": True,
    },
    "is killed before it has sent its retry": {
        "began": ("fails",),
        "sends_again": ("is killed",),
        "autoretry_for": (ConnectionError,),
        **LOST,
    },
    "is killed before it has sent its retry to the end of its line": {
        "began": ("fails",),
        "sends_again": ("is killed when all is made up for",),
        "autoretry_for": (ConnectionError,),
        "lock_order_retry": "end",
        **LOST,
    },
    "is killed before it has sent a retry as its turn did not come": {
        "sends_again": ("is killed when all is made up for",),
        "autoretry_for": (LockConflict,),
        "retry_kwargs": {"countdown": 0},
        "lock_max_wait": 1,
        **LOST,
    },
    "runs until it is let go": {"began": ("waits again",)},
    "is sent by no broker": {"sends": 2 * ("fails",)},
    "fails twice before it begins": {"before": 2 * ("fails",)},
    "finds no Redis": {"before": ("", "waits")},
    "finds no Redis, without a result": {"before": ("", "waits"), "ignore_result": True},
    "runs without Redis and fails": {
        "before": ("", "waits"),
        "began": ("fails",),
        "lock_on_unavailable": "run",
    },
    "runs without Redis and fails, without a result": {
        "before": ("", "waits"),
        "began": ("fails",),
        "lock_on_unavailable": "run",
        "ignore_result": True,
    },
    "runs without Redis and ends": {
        "before": ("", "waits"),
        "lock_on_unavailable": "run",
        "ignore_result": True,
    },
    "runs without Redis and is killed": {
        "before": ("", "waits", "waits again"),
        "began": ("waits and is killed",),
        "lock_on_unavailable": "run",
        **LOST,
    },
    "runs without Redis, acknowledged early": {
        "before": ("", "waits"),
        "began": ("waits again",),
        "lock_on_unavailable": "run",
        "acks_late": False,
    },
    "is retried, runs without Redis and is killed": {
        "before": ("", "waits"),
        "began": ("fails", "waits and is killed"),
        "autoretry_for": (ConnectionError,),
        "retry_kwargs": {"countdown": 0},
        "lock_keep_on_retry": True,
        "lock_on_unavailable": "run",
        **LOST,
    },
    "is killed before it has sent a retry of its conflict": {
        "before": ("", "waits"),
        "began": ("fails",),
        "sends_again": ("", "is killed when all is made up for"),
        "autoretry_for": (ConnectionError, LockConflict),
        "retry_kwargs": {"countdown": 0},
        "lock_keep_on_retry": True,
        "lock_gap_ttl": 1,
        "lock_on_conflict": "raise",
        **LOST,
    },
    "is retried when its wait is over": {
        "lock_max_wait": 1,
        "autoretry_for": (LockConflict,),
        "retry_kwargs": {"countdown": 1},
    },
}


def _task(kind: str, name: str) -> Any:
    options = {**KINDS[kind], **TASKS[name]}

    @app.task(bind=True, name=f"{kind} {name}", **options)
    def body(self: Any, account: str) -> object:
        return self.end("began", account)

    return body


ORDERED = "lock_order_retry"  # an option for those alone
tasks = {
    (kind, name): _task(kind, name)
    for kind in KINDS
    for name, options in TASKS.items()
    if kind == "ordered" or ORDERED not in options
}
