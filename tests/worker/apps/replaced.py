"""A worker that forks just when another thread of its main process has a lock of other software."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from celery.signals import worker_ready
from kombu.transport.redis import Channel

from celery_relock import LockedTask, signals
from tests.support import Journal, make_app

OF = "RELOCK_TEST_LOCKED"
app = make_app(__name__)
journal = Journal.from_env()
create_client = Channel._create_client
a_lock, is_ready, is_in = threading.Lock(), threading.Event(), threading.Event()


def dawdle(of: str) -> None:
    """Let the main thread fork now, if it can."""
    is_other = threading.current_thread() is not threading.main_thread()
    if is_other and is_ready.is_set() and os.environ[OF] == of:
        is_in.set()
        time.sleep(0.5)


@worker_ready.connect
def ready(**_: Any) -> None:
    is_ready.set()


def about_to_fork() -> None:
    if is_ready.is_set():
        is_in.wait(10)


@signals.lock_resumed.connect
def resumed(**_: Any) -> None:
    with a_lock:
        dawdle("a receiver of lock_resumed")


@signals.lock_reclaimed.connect
def reclaimed(**_: Any) -> None:
    with a_lock:
        dawdle("a receiver of lock_reclaimed")


def slowly(*args: Any, **kwargs: Any) -> Any:
    """Kombu calls it with a lock that is one for all channels (`cached_property`)."""
    dawdle("kombu")
    return create_client(*args, **kwargs)


Channel._create_client = slowly
os.register_at_fork(before=about_to_fork)


@app.task(base=LockedTask, lock_key="account:{account}")
def holds(account: str) -> None:
    journal.add("holds", account=account)
    time.sleep(60)


@app.task
def stays(account: str) -> None:
    journal.add("stays", account=account)
    journal.wait_for(f"end {account}", 60)


@app.task(base=LockedTask, lock_key="account:{account}")
def takes(account: str) -> int:
    with a_lock:
        app.send_task("nobody.hears", queue=f"nobody.{account}")
    return os.getpid()
