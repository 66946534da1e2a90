"""A killed process's locks are free as soon as it is dead: its task's, and others it holds.

Other ways to die: test_endings_child.py, test_endings_worker.py.
"""

from __future__ import annotations

import signal

from tests.support import wait_for
from tests.support.apps import LOOK_EVERY
from tests.support.parked import lock_of, wait_until_free

# The main process looks for children that have ended long after this test: nobody else tells of it.
NOT_SOON = {LOOK_EVERY: "60"}
APP = "tests.worker.apps.reaping"


def test_every_lock_of_a_killed_child_is_free_at_once_and_the_next_task_runs(new_worker):
    running = new_worker(APP, concurrency=2, env=NOT_SOON)
    lock = lock_of(running, "account:7")
    running.module.hold.delay("7", inner="inner")
    held = running.journal.wait_for("holding", timeout=20)[0]
    running.journal.wait_for("inner", timeout=20)
    running.module.follow.delay("7")
    wait_for(lambda: lock._engine.inspect(lock.name).waiting == 1, what="the next one in line")

    running.kill(signal.SIGKILL, pid=held.pid)
    followed = running.journal.wait_for("followed", timeout=30)[0]

    assert followed["fence"] > held["fence"]
    for each in ("inner", "inner coroutine"):
        wait_until_free(running, each)
    running.wait_for_log("reclaimed")
