"""A process that can start no thread: at the limit of the system, or while Python 3.12.1 ends."""

from __future__ import annotations

import pickle

from celery_relock.engine import platform
from tests.support import programs

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
