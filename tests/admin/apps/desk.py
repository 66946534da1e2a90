"""Tasks for people to look at."""

from __future__ import annotations

import sys

from celery import chain

from celery_relock import Lock, LockedTask, locked
from tests.support import Journal, make_app

KEY = "{key}"

app = make_app(__name__, task_track_started=True)
journal = Journal.from_env()


def stand(key):
    """Wait until the test lets a key go."""
    journal.wait_for(f"go {key}", 600)


@app.task(base=LockedTask, bind=True, lock_key=KEY)
def hold(self, key):
    journal.add(f"inside {key}", id=self.request.id)
    stand(key)
    return self.lock.lost


@app.task
def by_hand(key):
    with Lock(app.conf.relock_url, key, namespace=app.conf.relock_namespace):
        journal.add(f"inside {key}")
        stand(key)


@app.task(base=LockedTask, lock_key="outer {key}")
def takes_inside(key):
    take(key)


@app.task(base=LockedTask, lock_key="outer {key}")
def behind(key):
    journal.add(f"behind {key}")


@app.task(base=LockedTask, lock_key=KEY)
def take(key):
    journal.add(f"took {key}")


@app.task(base=LockedTask, lock_key=[KEY, "a {key}"], lock_limit={"a {key}": 2})
def both(key):
    journal.add(f"took {key}")


@app.task(base=LockedTask, lock_key=KEY, lock_limit=2)
def several(key):
    journal.add(f"inside {key}")
    stand(key)


@app.task(base=LockedTask, lock_key=[KEY, "{other}"], lock_limit={KEY: 2})
def several_and(key, other):
    journal.add(f"took {other}")


@app.task(base=LockedTask, lock_key=[KEY, "{other}"])
def pair(key, other):
    journal.add(f"took {key}")


@app.task(base=LockedTask, lock_key=KEY, lock_cooldown=600)
def cools(key):
    return key


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_keep_on_retry=True)
def again(self, key):
    if not self.request.retries:
        raise self.retry(countdown=600)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_keep_on_retry=True)
def again_elsewhere(self, key):
    raise self.retry(queue=f"no worker of {key}", countdown=0)


@app.task(base=LockedTask, bind=True, lock_key=KEY, track_started=False)
def soon_again(self, key):
    if not self.request.retries:
        raise self.retry(countdown=1)
    journal.add(f"inside {key}")
    stand(key)


@app.task(base=LockedTask, bind=True, lock_key=KEY, lock_order="sent", lock_order_retry="end")
def again_in_order(self, key):
    if not self.request.retries:
        raise self.retry(exc=RuntimeError("no luck"), countdown=600)


@app.task(base=LockedTask, lock_key=KEY, lock_dedup="until_start")
def once(key):
    return key


@app.task(base=LockedTask, lock_key=KEY, lock_order="sent")
def in_order(key, which):
    journal.add(f"{which} {key}")
    if which == "first":
        stand(key)


@app.task(base=LockedTask, lock_key=KEY, lock_order="sent", acks_late=True)
def in_order_again(key, which):
    journal.add(f"{which} {key}")
    stand(key)


@app.task(base=LockedTask, lock_key=KEY, lock_debounce=600)
def later(key):
    return key


@app.task(base=LockedTask, lock_key=KEY, lock_on_conflict="block", lock_max_wait=30)
def block(key):
    journal.add(f"took {key}")


@app.task(base=LockedTask, lock_key=KEY, lock_on_conflict="drop")
def drop(key):
    journal.add(f"took {key}")


@app.task
def bare(key):
    journal.add(f"inside {key}")
    stand(key)


@app.task(base=LockedTask, lock_key=KEY, rate_limit="1/h")
def limited(key):
    journal.add(f"took {key}")


@app.task
def joined(results):
    return results


@app.task
def linked(result):
    journal.add("linked", result=result)


@app.task(base=LockedTask, lock_key=KEY)
def loaded(key):
    """The modules of this library that the worker has loaded, now that it has held a lock."""
    return sorted(name for name in sys.modules if name.startswith("celery_relock"))


def workflow(key):
    """A plain step, and one behind it, under one lock."""
    return locked(chain(bare.si(key), bare.si(f"second {key}")), key=key)
