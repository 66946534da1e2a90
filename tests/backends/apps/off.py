"""Tasks that run without their locks, in an app whose lock Redis is not there."""

from __future__ import annotations

from typing import Any

from celery_relock import LockedTask
from tests.support import Journal, make_app

app = make_app(__name__, relock_enabled=False, relock_url="redis://127.0.0.1:1")
journal = Journal.from_env()


@app.task(base=LockedTask, bind=True, lock_key="account:{account}", lock_ttl=0.5)
def together(self: Any, account: int, others: int) -> dict[str, Any]:
    """Ends when so many are in their bodies at once."""
    journal.add("inside", account=account)
    journal.wait_for("inside", 20, count=others)
    lock = self.lock
    lock.check()
    return {
        "names": lock.names,
        "fence": lock.fence,
        "protected": lock.protected,
        "lost": lock.lost,
        "continuous": lock.continuous,
        "reentered": lock.reentered,
    }


@app.task(
    base=LockedTask, bind=True, lock_key="report", lock_dedup="until_done", lock_keep_on_retry=True
)
def report(self: Any) -> tuple[int, bool]:
    if not self.request.retries:
        # Not at once: without a lock between them Celery may store RETRY after the retry's SUCCESS.
        raise self.retry(countdown=0.5)
    return self.request.retries, self.lock.continuous
