"""One app in two deployments, which share the broker by a prefix of its keys, and the locks."""

from __future__ import annotations

import os

from celery_relock import LockedTask
from tests.support import Journal, make_app
from tests.support.keys import BENCH_PREFIX

name = os.environ["RELOCK_TEST_DEPLOYMENT"]
prefix = f"{BENCH_PREFIX}celery:{os.environ['RELOCK_TEST_NAMESPACE']}:{name}:"
app = make_app(__name__, broker_transport_options={"global_keyprefix": prefix})
journal = Journal.from_env()


@app.task(base=LockedTask, lock_key="account:{account}")
def charge(account: str) -> None:
    journal.add("charged", account=account, by=name)
