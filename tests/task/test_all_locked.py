"""`Celery(task_cls=LockedTask)` with an option for all tasks: Celery's own tasks go as they do
without."""

from __future__ import annotations

import json

import pytest
from celery import chord

OPTIONS = {
    "relock_order": "sent",
    "relock_dedup": "until_done",
    "relock_debounce": 0.3,
    "relock_cooldown": 5,
    "relock_hold": "workflow",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_tasks_of_celery_can_be_sent(new_worker, account, option):
    settings = json.dumps({option: OPTIONS[option]})
    started = new_worker("tests.task.apps.all_locked", env={"RELOCK_TEST_SETTINGS": settings})
    module = started.module
    double, cleanup = module.double, module.app.tasks["celery.backend_cleanup"]
    sent = [cleanup.delay() for _ in range(2)]
    assert len({each.id for each in sent}) == 2, "a call of a task without a lock is no duplicate"
    assert [each.get(timeout=20) for each in sent] == [None, None]
    twos = [f"{account}-{number}" for number in range(2)]
    assert double.map(twos).delay().get(timeout=20) == [2, 2]
    both = [(f"{account}-{number}", number) for number in range(2, 4)]
    assert double.chunks(both, 1).delay().get(timeout=20) == [[4], [6]]
    header = [double.si(f"{account}-{number}", number) for number in range(4, 6)]
    assert chord(header, module.total.s()).delay().get(timeout=20) == 18
