"""Two apps in one process: brokers of their own, one Redis for the locks of both."""

from __future__ import annotations

import os
from typing import Any

from celery_relock import LockedTask
from tests.support import Journal, make_app
from tests.support.keys import BENCH_PREFIX

namespace = os.environ["RELOCK_TEST_NAMESPACE"]
journal = Journal.from_env()


def _app(name: str) -> Any:
    prefix = {"global_keyprefix": f"{BENCH_PREFIX}celery:{namespace}:{name}:"}
    made = make_app(name, broker_transport_options=prefix)

    @made.task(base=LockedTask, bind=True, name="hold", lock_key="account:{account}")
    def hold(self: Any, account: str) -> None:
        journal.add("held", account=account, app=name)
        journal.wait_for(f"free {account}", 30)

    @made.task(base=LockedTask, bind=True, name="takes", lock_key="account:{account}")
    def takes(self: Any, account: str) -> str:
        journal.add("took", account=account, app=name, id=self.request.id)
        return name

    return made


first, second = _app("first"), _app("second")
app = {"first": first, "second": second}[os.environ.get("RELOCK_TEST_APP", "first")]
