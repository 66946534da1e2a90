"""An app whose class for tasks lets each task run as the tenant that it was sent by, as that of
tenant-schemas-celery does."""

from __future__ import annotations

from contextvars import ContextVar

from celery import Task

from celery_relock import LockedTask
from tests.support import make_app

tenant: ContextVar[str] = ContextVar("tenant", default="")


class TenantTask(Task):
    abstract = True

    def apply_async(self, args=None, kwargs=None, *more, **options):
        headers = {"tenant": tenant.get(), **(options.get("headers") or {})}
        return super().apply_async(args, kwargs, *more, **{**options, "headers": headers})

    def before_start(self, task_id, args, kwargs):
        tenant.set(self.request.get("tenant") or "")

    def after_return(self, *_):
        tenant.set("")


app = make_app(__name__)
app.task_cls = TenantTask


@app.task
def plain():
    return tenant.get()


class LockedTenantTask(LockedTask, TenantTask):
    abstract = True


@app.task(base=LockedTenantTask, lock_key="one")
def exclusive():
    return tenant.get()
