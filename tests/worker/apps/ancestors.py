"""Locked tasks that send messages to tasks with the same lock, and wait for them or do not."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from celery import chain, chord, current_task, group
from celery.exceptions import Ignore
from celery.result import allow_join_result

from celery_relock import LockedTask
from tests.support import Journal, make_app
from tests.support.permits import holding

KEY = "account:{account}"

app = make_app(__name__)
journal = Journal.from_env()


def locked(**options: Any) -> Any:
    options = {"lock_reentrant": "descendants", **options}
    return app.task(base=LockedTask, lock_key=KEY, bind=True, **options)


def told(work: Any = None) -> dict[str, Any]:
    """What the running task sees of its lock, and what `work` gives under it."""
    hold = current_task.lock
    with holding(journal, hold):
        inner = work() if work is not None else None
        assert not hold.lost
    return {"fence": hold.fence, "reentered": hold.reentered, "inner": inner}


def result_of(sent: Any) -> Any:
    with allow_join_result():
        return sent.get(timeout=20)


def met(name: str, account: str, count: int = 1) -> None:
    """Wait until so many tasks have said so."""
    journal.wait_for(name, count=count, account=account)


@locked()
def take(self, account):
    journal.add("took", account=account)
    return told()


@locked()
def take_after(self, previous, account):
    return told()


@locked(lock_reentrant="inline")
def takes_inline_only(self, account):
    return told()


@locked()
def waits_for_a_child(self, account):
    return told(lambda: result_of(take.delay(account)))


@locked()
def waits_by_name(self, account):
    return told(lambda: result_of(app.send_task(take.name, (account,))))


@locked()
def waits_deeper(self, account, depth):
    def work():
        return result_of(waits_deeper.delay(account, depth - 1)) if depth else None

    return told(work)


@app.task
def relays(account, depth):
    """Not a locked task: the ancestors pass through it."""
    sent = relays.delay(account, depth - 1) if depth else take.delay(account)
    return result_of(sent)


@locked()
def waits_through_unlocked_tasks(self, account):
    return told(lambda: result_of(relays.delay(account, 1)))


@app.task(base=LockedTask, lock_key="other:{account}")
def calls_in_a_thread(account):
    return asyncio.run(asyncio.to_thread(take, account))


@locked()
def waits_for_what_a_child_calls_in_a_thread(self, account):
    return told(lambda: result_of(calls_in_a_thread.delay(account)))


@locked()
def waits_for_a_chain(self, account):
    def work():
        last = chain(take.s(account), relays.si(account, 0), take_after.s(account)).delay()
        return [result_of(last.parent.parent), result_of(last.parent), result_of(last)]

    return told(work)


@locked()
def waits_for_a_chord(self, account):
    return told(lambda: result_of(chord([take.s(account)] * 2, take_after.s(account)).delay()))


@locked()
def adds_to_its_chord(self, account):
    self.add_to_chord(take.s(account))
    return told()


@app.task
def everything(results):
    return results


@locked()
def waits_for_an_added_member(self, account):
    header = group([adds_to_its_chord.s(account)])
    return told(lambda: result_of(chord(header, everything.s()).delay()))


@locked()
def waits_for_a_link(self, account):
    def work():
        relays.apply_async((account, 0), link=signals_from_within.si(account))
        met("linked", account)

    return told(work)


@locked()
def signals_from_within(self, account):
    return told(lambda: journal.add("linked", account=account))


@locked()
def tries_twice(self, account):
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    return told()


@locked()
def waits_for_a_retried_child(self, account):
    return told(lambda: result_of(tries_twice.delay(account)))


@locked()
def retries_and_leaves_slowly(self, account):
    if self.request.retries:
        return told()
    with holding(journal, self.lock):
        try:
            raise self.retry(countdown=0)
        finally:
            time.sleep(0.7)


@locked()
def is_replaced(self, account):
    try:
        with holding(journal, self.lock):
            journal.add("replacing", account=account, fence=self.lock.fence)
            raise self.replace(take.s(account))
    finally:
        met("took", account)


@locked()
def waits_for_a_replaced_child(self, account):
    return told(lambda: result_of(is_replaced.delay(account)))


@locked()
def leaves_a_child_behind(self, account):
    def work():
        child = lingers.delay(account)
        met("lingering", account)
        return child.id

    return told(work)


@locked()
def lingers(self, account):
    def work():
        journal.add("lingering", account=account)
        met("go on", account)

    return told(work)


BOTH = [KEY, "ledger:{account}"]


@app.task(base=LockedTask, lock_key=BOTH)
def wants_both(account):
    return "had both"


@app.task(base=LockedTask, lock_key=BOTH, lock_reentrant="descendants")
def needs_both(account):
    return "had both"


@locked()
def waits_for_a_child_that_needs_another_lock_as_well(self, account):
    other = wants_both.delay(account)
    journal.wait_for("parked", account=account)
    return [other.id, result_of(needs_both.delay(account))]


@locked()
def sends_a_child_that_may_not_re_enter(self, account):
    return told(lambda: takes_inline_only.delay(account).id)


@locked()
def sends_from_a_thread(self, account):
    def work():
        sent = []
        thread = threading.Thread(target=lambda: sent.append(take.delay(account).id))
        thread.start()
        thread.join()
        return sent[0]

    return told(work)


@locked()
def sends(self, account):
    return told(lambda: take.delay(account).id)


@app.task
def fans_out(account, name):
    """Not a locked task: its children are siblings."""
    return [app.tasks[name].delay(account).id for _ in range(4)]


@locked()
def works(self, account):
    return told(lambda: time.sleep(0.05))


@locked(lock_reentrant="workflow")
def meets_its_siblings(self, account):
    def work():
        journal.add("inside", account=account)
        met("inside", account, count=4)

    return told(work)


@locked()
def tells_its_ancestors(self, account, again):
    """Sends itself `again` times and waits for none."""
    journal.add("ancestors", account=account, again=again, ids=self.request.relock.get("ancestors"))
    if again:
        tells_its_ancestors.delay(account, again - 1)


@app.task(base=LockedTask, lock_key=KEY)
def counts(account):
    """A read-modify-write, slow enough for another one to come between."""
    before = app.backend.client.get(f"{app.conf.relock_namespace}:{account}")
    time.sleep(0.05)
    app.backend.client.set(f"{app.conf.relock_namespace}:{account}", int(before or 0) + 1)


@app.task(base=LockedTask, lock_key=KEY, lock_order="sent")
def comes_in_order(account, sends=False):
    """It may send another one, which comes behind it."""
    if sends:
        journal.add("sent", account=account, id=comes_in_order.delay(account).id)
        journal.wait_for(f"go {account}", timeout=30)


@app.task(base=LockedTask, lock_key=KEY)
def sends_those_that_do_not_wait(account):
    for policy in ("drop", "raise"):
        sent = counts.apply_async((account,), lock_on_conflict=policy)
        journal.add("sent", account=account, policy=policy, id=sent.id)
    journal.wait_for(f"go {account}", timeout=30)


@app.task(base=LockedTask, lock_key=KEY)
def sends_one_that_waits_in_its_slot(account):
    sent = counts.apply_async((account,), lock_on_conflict="block")
    journal.wait_for(f"go {account}", timeout=30)
    return sent.id


@app.task(base=LockedTask, lock_key=KEY)
def sends_six_that_count(account):
    sent = [counts.delay(account).id for _ in range(6)]
    journal.wait_for(f"go {account}", timeout=30)
    counts(account)
    return sent


@app.task(base=LockedTask, lock_key=KEY, bind=True)
def replaces_itself(self, account, by_a_chain):
    by = counts.si(account)
    try:
        self.replace(chain(by, counts.si(account)) if by_a_chain else by)
    except Ignore:
        # The replacement is sent, and meets the lock before this body has released it.
        journal.wait_for(f"go {account}", timeout=30)
        raise


@app.task(base=LockedTask, lock_key=KEY)
def sends_itself(account, left):
    key = f"{app.conf.relock_namespace}:{account}"
    assert app.backend.client.incr(key) == 1, "two of them at once"
    if left:
        sends_itself.delay(account, left - 1)
    time.sleep(0.1)
    app.backend.client.decr(key)
    if not left:
        journal.add("last", account=account)
