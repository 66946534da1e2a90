"""A process that can start no thread: at the limit of the system, or while Python 3.12.1 ends."""

from __future__ import annotations

import _thread
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_relock.engine import platform, renewal
from tests.support import programs, wait_for

# Every lock says so, by the error of its interface, and none stays held.
PROGRAM = """
import _thread, asyncio
from celery_relock import Lock
from celery_relock.asyncio import Lock as AsyncLock
from celery_relock.errors import LockUnavailable

def refuse(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")

async def acquire_in_a_loop():
    await AsyncLock(URL, "b", namespace=NAMESPACE).acquire()

def tell(call):
    try:
        say(call())
    except LockUnavailable as error:
        say(error.reason)

_thread.start_new_thread = refuse
tell(Lock(URL, "a", namespace=NAMESPACE).acquire)
tell(Lock(URL, "a", namespace=NAMESPACE).locked)
tell(lambda: asyncio.run(acquire_in_a_loop()))
tell(Lock(URL, "b", namespace=NAMESPACE).locked)
"""


def test_a_lock_that_needs_a_thread_is_unavailable_and_says_why(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(PROGRAM, redis_url, namespace)
    assert said[1::2] == ["False", "False"]
    for reason in said[::2]:
        assert "no thread" in reason
        assert "(can't create new thread at interpreter shutdown)" in reason


def test_the_error_survives_pickle() -> None:
    again = pickle.loads(pickle.dumps(platform.NoThread("no thread")))
    assert type(again) is platform.NoThread
    assert again.page.endswith("/LockUnavailable.html")


def test_without_a_thread_for_the_inbox_leases_are_renewed_and_it_is_opened_later(
    runs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renewal, "_LISTEN_AGAIN", 1.0)
    process = runs()
    process.release(process.held("first"))  # the keep-alive thread is there

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limit:
        limit.setattr(_thread, "start_new_thread", refuse)
        leases = [process.held(f"lock {n}", lease=2.0) for n in range(30)]
        time.sleep(4.0)  # each hold became long meanwhile, and asked for the inbox
        assert not any(lease.lost for lease in leases)
        assert not process.engine.inbox.thread.on
    wait_for(lambda: process.engine.inbox.thread.on, what="the inbox")
    said = "opening the inbox failed, trying again: A lock needs a thread"
    wait_for(lambda: said in caplog.text, what="the news of it")
    assert [each.levelname for each in caplog.records if said in each.message] == ["WARNING"]
    for lease in leases:
        assert process.release(lease)
