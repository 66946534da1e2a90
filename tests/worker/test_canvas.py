"""Every task of an app may be a LockedTask: canvas gives what it gives without locks."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from celery_relock import LockedTask
from celery_relock.backends.redis.scripts import scripts
from celery_relock.declaration import declaration
from tests.support import wait_for
from tests.support.redis_server import calls_of

CANVASES = [
    "chain",
    "group",
    "chord",
    "chord of chains",
    "chain with a group",
    "chord with a failing member",
    "chain with a failing step",
    "map",
    "starmap",
    "chunks",
    "chunks as a group",
]


@pytest.fixture(scope="module")
def worker(module_worker, locks):
    return module_worker(
        "tests.worker.apps.canvas", concurrency=3, env={"RELOCK_TEST_LOCKS": locks.url}
    )


def _outcome(signature):
    result = signature.apply_async()
    # Of a chord that fails, `get` raises its own error or that of the member, depending on whether
    # the member has failed when `get` begins.
    wait_for(result.ready)
    try:
        return result.get(timeout=30)
    except Exception as error:
        return type(error).__name__, str(error).partition("(")[0].partition(" ")[0]


@pytest.mark.parametrize("name", CANVASES)
def test_canvas_of_locked_tasks_ends_as_that_of_plain_ones(worker, name):
    module = worker.module
    with_locks, without = (module.canvases(*tasks)[name] for tasks in (module.locked, module.plain))
    assert _outcome(with_locks) == _outcome(without)


def test_the_built_in_tasks_are_locked_tasks_that_lock_nothing(worker):
    built_in = [t for name, t in worker.module.app.tasks.items() if name.startswith("celery.")]
    assert len(built_in) >= 7
    for task in built_in:
        assert isinstance(task, LockedTask)
        assert declaration(type(task)).rule.off


def test_a_built_in_task_takes_no_lock(worker, locks):
    app, server = worker.module.app, locks.client()
    with server.monitor() as monitor:
        # That of redis-py 5.0 loses a command with a bracket in its arguments.
        monitor.monitor_re = re.compile(r"\[(\d+) (.*?)\] (.*)")
        assert app.tasks["celery.backend_cleanup"].delay().get(timeout=20) is None
        assert worker.module.plain[0].map([1, 2]).apply_async().get(timeout=20) == [1, 2]
        assert worker.module.locked[0].delay(1).get(timeout=20) is not None
        server.echo("over")
        asked, command = Counter(), ""
        while not command.startswith("ECHO"):
            command = monitor.next_command()["command"]
            asked.update(name for name, script in scripts().items() if script.sha in command)
    # By the locked task alone. What else is asked, the worker asks for itself.
    assert (asked["acquire"], asked["release"]) == (1, 1)
    assert not asked["place"] + asked["debounce"]


def test_chord_unlock_which_other_result_backends_need_is_not_locked(worker):
    module = worker.module
    _, total, _ = module.locked
    header = module.canvases(*module.locked)["group"].apply_async()
    body = total.s().set(task_id="the-body-of-the-chord")
    unlock = module.app.tasks["celery.chord_unlock"]
    unlock.apply_async((header.id, body), {"result": [r.as_tuple() for r in header.results]})
    assert module.app.AsyncResult("the-body-of-the-chord").get(timeout=30) == 12


def test_each_item_of_a_map_acquires_a_lock_of_its_own(worker, locks):
    client = locks.client()
    add = worker.module.locked[0]
    add.delay(1).get(timeout=20)
    before = calls_of(client, "evalsha", "eval")
    assert add.map([1, 2, 3]).apply_async().get(timeout=20) == [1, 2, 3]
    assert calls_of(client, "evalsha", "eval") - before >= 6
