"""Tasks whose calls are merged. Those with a pause of ten minutes end when the test says so."""

from __future__ import annotations

import time

from celery_relock import LockedTask
from tests.support import Journal, make_app

KEY = "shop:{shop}"

app = make_app(
    __name__,
    task_publish_retry=False,
    worker_prefetch_multiplier=1,
)
journal = Journal.from_env()


def work(task, shop, what):
    told = {"shop": shop, "id": task.request.id, "what": what}
    journal.add("began", retries=task.request.retries, **told)
    if shop.startswith("slow"):
        journal.wait_for(f"free {shop}", 30)
    return what


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_debounce=0.5, lock_debounce_max=5)
def soon(self, shop, what=None):
    return work(self, shop, what)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_debounce=600)
def later(self, shop, what=None):
    return work(self, shop, what)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_debounce=600, max_retries=1)
def tries_twice(self, shop, what=None):
    work(self, shop, what)
    if not self.request.retries:
        raise self.retry(countdown=0)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_debounce=600, lock_dedup="until_done")
def one_at_a_time(self, shop, what=None):
    return work(self, shop, what)


def both(earlier, later):
    return {**later, "ids": earlier["ids"] + later["ids"]}


@app.task(
    base=LockedTask,
    bind=True,
    lock_key=KEY,
    lock_debounce=0.5,
    lock_debounce_max=2,
    lock_debounce_reduce=both,
)
def all_ids(self, shop, ids=(), *, how="fast"):
    return work(self, shop, [ids, how])


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_debounce=600)
def sends(self, shop, what=None):
    """Its own next call, as of any program."""
    if what is None:
        return sends.delay(shop, "again").id
    return work(self, shop, what)


def call_and_wait(shop):
    """In a process that is to be killed."""
    print(later.delay(shop, "last words").id, flush=True)
    time.sleep(600)


def call_often(shop, caller, calls):
    for number in range(calls):
        all_ids.delay(shop, [f"{caller}-{number}"])
