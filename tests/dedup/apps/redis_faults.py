"""Tasks with a dedup marker until their bodies begin. A proxy is the way to their locks."""

from __future__ import annotations

from celery_relock import LockedTask
from tests.support import Journal, make_app
from tests.support.without_broker import WithoutABroker

app = make_app(__name__, worker_prefetch_multiplier=1)
journal = Journal.from_env()


def _task(name, base=LockedTask, **options):
    def work(self, account):
        journal.add("began", account=account, lost=self.lock.lost)
        return self.request.id

    options = {"lock_key": "account:{account}", "lock_dedup": "until_start", **options}
    return app.task(work, name=name, base=base, bind=True, **options)


raises = _task("raises")
runs = _task("runs", lock_on_unavailable="run")
comes_back = _task("comes back", lock_on_unavailable="retry", max_retries=0)
stays = _task("stays", WithoutABroker, lock_on_unavailable="retry")
stays_briefly = _task("stays briefly", WithoutABroker, lock_on_unavailable="retry", lock_max_wait=2)
