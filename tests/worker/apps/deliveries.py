"""A locked task in a worker that notes every signal of each of its deliveries."""

from __future__ import annotations

from celery import signals as celery_signals

from celery_relock import LockedTask, signals
from tests.support import Journal, make_app

app = make_app(__name__)
journal = Journal.from_env()


class Watched(LockedTask):
    def before_start(self, task_id, args, kwargs):
        note("before_start", task_id)

    def on_success(self, retval, task_id, args, kwargs):
        note("on_success", task_id)

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        note("after_return", task_id)


@app.task(base=Watched, bind=True, lock_key="{key}")
def work(self, key):
    note("body", self.request.id)
    journal.wait_for("gate", 60, key=key)


def note(what, task_id):
    journal.add("fires", what=what, id=task_id)


def _watch(signal):
    def receive(sender=None, task_id=None, request=None, headers=None, **_):
        request = request or getattr(sender, "request", None)
        told = task_id or getattr(request, "id", None) or (headers or {}).get("id")
        note(signal.name, told)

    signal.connect(receive, weak=False)


for each in (
    celery_signals.before_task_publish,
    celery_signals.after_task_publish,
    celery_signals.task_received,
    celery_signals.task_prerun,
    celery_signals.task_success,
    celery_signals.task_failure,
    celery_signals.task_retry,
    celery_signals.task_revoked,
    celery_signals.task_rejected,
    celery_signals.task_postrun,
    *(each for name, each in vars(signals).items() if name.startswith("lock_")),
):
    _watch(each)
