"""The shop of docs/operations.md."""

from __future__ import annotations

from celery_relock import LockedTask
from tests.support import Journal, make_app

KEY = "account:{account_id}"

app = make_app("shop", worker_send_task_events=False)
journal = Journal.from_env()


@app.task(base=LockedTask, lock_key=KEY, name="shop.charge")
def charge(account_id):
    """Holds its lock until the test says that it may go, once more each time."""
    journal.add("inside", account=account_id)
    turn = len(journal.events("inside", account=account_id))
    journal.wait_for("go", 60, turn, account=account_id)


@app.task(base=LockedTask, lock_key=KEY, name="shop.import_file")
def import_file(account_id):
    pass


@app.task(base=LockedTask, lock_key=KEY, name="shop.refresh", lock_on_conflict="drop")
def refresh(account_id):
    pass
