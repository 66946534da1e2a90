"""Tasks whose calls say something of their own: options, and the prefix of the lock names."""

from __future__ import annotations

from contextvars import ContextVar

from celery_relock import LockedTask
from tests.support.apps import make_app

#: Of the process that sends. A worker has no tenant of its own.
tenant: ContextVar[str] = ContextVar("tenant", default="")

app = make_app(__name__, relock_prefix=tenant.get)


@app.task(bind=True, base=LockedTask, lock_key="account:{account}")
def look(self, account):
    return [self.lock.name, self.lock.remaining]


@app.task(base=LockedTask, lock_key="account:{account}", lock_max_wait=0.2)
def hurries(account):
    return account


@app.task(bind=True, base=LockedTask, lock_key="account:{account}")
def looks_inside(self, account):
    """A call inside of the body has the same lock, and so re-enters."""
    return look(account)


@app.task(bind=True, base=LockedTask, lock_key="account:{account}")
def applies_inside(self, account):
    name, _ = look.apply((account,)).get(disable_sync_subtasks=False)
    return [name, says_whether_reentered.apply((account,)).get(disable_sync_subtasks=False)]


@app.task(bind=True, base=LockedTask, lock_key="account:{account}")
def says_whether_reentered(self, account):
    return self.lock.reentered


@app.task
def plain():
    """No locked task: what is behind it in a chain may be one."""


@app.task
def sends(signature):
    return app.signature(signature).delay().id


@app.task(base=LockedTask, lock_key="sends")
def sends_under_lock(signature):
    return sends(signature)


@app.task(bind=True, base=LockedTask, lock_key="account:{account}", max_retries=1)
def retries(self, account, ttl=None):
    if not self.request.retries:
        raise self.retry(countdown=0, **({"lock_ttl": ttl} if ttl else {}))
    return [self.lock.name, self.lock.remaining]


@app.task(base=LockedTask, lock_key="other:{account}")
def applies_a_retry(account):
    return retries.apply((account,), lock_ttl=90).get(disable_sync_subtasks=False)


@app.task(base=LockedTask, lock_key="report:{account}", lock_dedup="until_start")
def report(account):
    return account


@app.task(
    base=LockedTask, lock_key=["all", "team:{team}"], lock_limit=[3, 1], lock_on_conflict="raise"
)
def of_team(team, body):
    return body()


@app.task(
    base=LockedTask,
    lock_key=["all", "team:{team}"],
    lock_limit={"all": 3},
    lock_on_conflict="raise",
)
def of_team_by_template(team, body):
    return body()


@app.task(bind=True, base=LockedTask, lock_key="{task}:{account}")
def by_task(self, account):
    return self.lock.name


@app.task(bind=True, base=LockedTask, lock_key="{task}")
def by_argument(self, task):
    return self.lock.name


@app.task(base=LockedTask, lock_key="cool:{account}", lock_cooldown=1.5)
def cools(account, do=""):
    if do:
        raise ValueError(do)
    return "ran"


@app.task(base=LockedTask, lock_key="cool:{account}", lock_cooldown=60)
def cools_for_long(account):
    return "ran"


@app.task(base=LockedTask, lock_key="cool:{account}", lock_reentrant="workflow")
def other_of_the_workflow(account):
    return "ran"


class ByRegion(LockedTask):
    name = "by_region"
    region = "north"
    lock_key = "region:{self.region}"

    def run(self):
        return self.lock.name


by_region = app.register_task(ByRegion())
