"""A task that writes down when it begins and ends, and many processes that call it at once."""

from __future__ import annotations

import os
import sys
import time

import redis

from celery_relock import LockedTask
from tests.support import make_app
from tests.support.keys import BENCH_PREFIX

app = make_app(__name__)
LOG = f"{BENCH_PREFIX}race:{os.environ['RELOCK_TEST_NAMESPACE']}"
_clients: dict[int, redis.Redis] = {}


def log(*words):
    """One line, in the order in which the server got it."""
    pid = os.getpid()
    if pid not in _clients:
        _clients[pid] = redis.Redis.from_url(os.environ["RELOCK_TEST_URL"])
    _clients[pid].rpush(LOG, " ".join(map(str, words)))


def work(self):
    log("began", self.request.id)
    time.sleep(0.005)
    log("ended", self.request.id)


@app.task(base=LockedTask, bind=True, lock_key="race", lock_dedup="until_start")
def until_start(self):
    work(self)


@app.task(base=LockedTask, bind=True, lock_key="race", lock_dedup="until_done")
def until_done(self):
    work(self)


@app.task(
    base=LockedTask,
    bind=True,
    lock_key="race",
    lock_dedup="until_start",
    lock_on_duplicate="replace",
    lock_on_conflict="block",
)
def last_wins(self):
    work(self)


def call(name, processes, calls):
    """Fork so many processes that call a task so many times each, all from one moment on, and wait
    for them."""
    task, children = app.tasks[f"{__name__}.{name}"], []
    (gate, opens), (ready, stands) = os.pipe(), os.pipe()
    for number in range(processes):
        pid = os.fork()
        if not pid:
            os.close(opens)
            task.marked()  # connects
            os.write(stands, b".")
            os.read(gate, 1)
            for each in range(calls):
                log("calls", number, each)
                log("got", number, each, task.delay().id)
            os._exit(0)
        children.append(pid)
    for _ in children:
        os.read(ready, 1)
    os.close(opens)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
    assert not failed, failed


if __name__ == "__main__":
    from tests.dedup.apps import race

    race.call(sys.argv[1], *map(int, sys.argv[2:]))
