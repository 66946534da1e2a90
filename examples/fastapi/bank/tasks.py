"""The tasks of the bank, and what they lock."""

import csv
import os
from pathlib import Path

from celery import Celery
from celery_relock import LockedTask
from celery_relock.errors import LockLost
from sqlalchemy.orm import Session

from . import partner
from .database import Account, Entry, engine

STATEMENTS = Path(__file__).parents[1] / "statements"
REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

app = Celery("bank", broker=REDIS_URL, backend=REDIS_URL)
app.conf.update(
    relock_namespace="bank",
    # A task whose process is killed runs again at once; if its machine is gone, after 10 minutes.
    # A longer task is delivered a second time then; the copy waits for the lock and is discarded.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    broker_transport_options={"visibility_timeout": 600},
    beat_schedule={
        "import": {"task": "bank.tasks.import_statement", "schedule": 60.0, "args": ["acme"]},
    },
)

# Whoever changes an account holds this lock: these tasks, and the endpoint that closes accounts.
ACCOUNT = "account:{account_id}"


@app.task(
    bind=True, base=LockedTask, lock_key=ACCOUNT, autoretry_for=(LockLost,), retry_backoff=True
)
def pay(self, account_id: int, payment_id: str) -> str:
    """Carry out a payment if the account covers it.

    No database transaction is open while the partner is asked, which can take a minute. The lock
    makes sure that nobody else spends the same money in the meantime.
    """
    with Session(engine) as session:
        payment = session.get_one(Entry, payment_id)
        account = session.get_one(Account, account_id)
        if payment.state != "new":
            return payment.state  # the message was delivered twice
        cents, covered = payment.cents, not account.closed and account.balance >= payment.cents
    if covered:
        partner.transfer(payment_id, cents)
    else:
        partner.cancel(payment_id)  # of an execution that paid, and then lost its lock
    with Session(engine) as session, session.begin(), self.lock.fenced(session):
        payment = session.get_one(Entry, payment_id)
        payment.state = "sent" if covered else "refused"
        if covered:
            session.get_one(Account, account_id).balance -= cents
        return payment.state


@app.task(bind=True, base=LockedTask, lock_key=ACCOUNT)
def deposit(self, account_id: int, line: str, cents: int) -> bool:
    """Book a line of a statement, once."""
    with Session(engine) as session, session.begin(), self.lock.fenced(session):
        if session.get(Entry, line):
            return False
        session.add(Entry(id=line, account_id=account_id, cents=cents, state="booked"))
        session.get_one(Account, account_id).balance += cents
        return True


@app.task(
    base=LockedTask,
    lock_key="import:{bank}",
    lock_on_conflict="drop",  # the next import makes up for it
    lock_dedup="until_start",  # one import in the queue is enough
)
def import_statement(bank: str) -> int:
    """Book a statement. Beat sends this every minute; an import can take longer."""
    with (STATEMENTS / f"{bank}.csv").open(newline="") as lines:
        # A direct call acquires the lock of the account, as a message would.
        return sum(
            deposit(int(row["account"]), row["line"], int(row["cents"]))
            for row in csv.DictReader(lines)
        )
