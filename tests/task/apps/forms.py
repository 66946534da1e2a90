"""Every form that a task can have, each with one lock for its account."""

from __future__ import annotations

from typing import Any

from celery import Celery, current_task, shared_task
from pydantic import BaseModel

from celery_relock import LockedTask
from celery_relock.engines import engine_for
from celery_relock.errors import LockConflict, RelockError
from tests.support import Journal, make_app

KEY = "account:{account}"

app: Celery = make_app(
    __name__,
    task_annotations={
        "tests.task.apps.forms.annotated": {
            "lock_key": KEY,
            "@__call__": lambda call: lambda self, *args, **kwargs: call(self, *args, **kwargs),
        }
    },
)
journal = Journal.from_env()


def holds(lock: str) -> int:
    """How many holds of the lock are live, as the server knows."""
    engine = engine_for(app.conf.relock_url, app.conf.relock_namespace)
    return len(engine.inspect(lock).holds)


def look(account: str) -> dict[str, Any]:
    """What the body of a task sees of its lock; called in the body."""
    hold = current_task.lock
    return {"name": hold.name, "fence": hold.fence, "holds": holds(f"account:{account}")}


@app.task(base=LockedTask, lock_key=KEY)
def plain(account):
    return look(account)


@app.task(base=LockedTask, lock_key=KEY, bind=True)
def bound(self, account):
    assert self.lock.fence == current_task.lock.fence
    return look(account)


class CallsSuper(LockedTask):
    def __call__(self, *args, **kwargs):
        return {**super().__call__(*args, **kwargs), "own": holds(f"account:{args[0]}")}


@app.task(base=CallsSuper, lock_key=KEY)
def own_call_with_super(account):
    return look(account)


class CallsRun(LockedTask):
    def __call__(self, *args, **kwargs):
        return {**self.run(*args, **kwargs), "own": holds(f"account:{args[0]}")}


@app.task(base=CallsRun, lock_key=KEY, bind=True)
def own_call_without_super(self, account):
    return {"name": self.lock.name, "fence": self.lock.fence, "holds": holds(f"account:{account}")}


class CallMixin:
    def __call__(self, *args, **kwargs):
        return {**super().__call__(*args, **kwargs), "own": holds(f"account:{args[0]}")}


class MixedIn(CallMixin, LockedTask):
    pass


@app.task(base=MixedIn, lock_key=KEY)
def own_call_in_a_mixin(account):
    return look(account)


@app.task(base=LockedTask)
def annotated(account):
    return look(account)


class ClassBased(LockedTask):
    name = "tests.task.apps.forms.class_based"
    lock_key = KEY

    def run(self, account):
        return look(account)


class_based = app.register_task(ClassBased())


class Inherited(ClassBased):
    name = "tests.task.apps.forms.inherited"

    def run(self, account):
        return super().run(account)


inherited = app.register_task(Inherited())


class ForAnother(ClassBased):
    """Runs its base's body for another account, with what that takes."""

    name = "tests.task.apps.forms.for_another"

    def run(self, account, *others):
        inner = [super(ForAnother, self).run(each) for each in (account, *others)]
        return [each["name"] for each in inner], self.lock.name


for_another = app.register_task(ForAnother())


class ForAll(ClassBased):
    """The arguments of its own body do not fit its base's."""

    name = "tests.task.apps.forms.for_all"

    def run(self, *, account):
        return super().run(account)


for_all = app.register_task(ForAll())


class Unnamed(LockedTask):
    """Celery gives it a name when it is registered."""

    lock_key = KEY
    autoretry_for = (ValueError,)
    retry_kwargs = {"max_retries": 1, "countdown": 0}

    def run(self, account, fails=False):
        if fails and not self.request.retries:
            raise ValueError(account)
        return look(account)


unnamed = app.register_task(Unnamed())


class UnnamedToo(Unnamed):
    """So is a subclass, which has a name of its own."""

    lock_key = None

    def run(self, account):
        return self.lock.name


unnamed_too = app.register_task(UnnamedToo())


@shared_task(base=LockedTask, lock_key=KEY)
def shared(account):
    return look(account)


@app.task(base=LockedTask, lock_key=KEY, typing=False)
def untyped(account):
    return look(account)


@app.task(base=LockedTask, lock_key=lambda account: f"account:{account}")
def key_from_a_callable(account):
    return look(account)


class Method(LockedTask):
    def lock_key(self, account):
        assert self.name.endswith("key_from_a_method")
        return f"account:{account}"


@app.task(base=Method)
def key_from_a_method(account):
    return look(account)


class Transfer(BaseModel):
    account: str


@app.task(base=LockedTask, lock_key="account:{transfer[account]}", pydantic=True)
def with_a_model(transfer: Transfer):
    assert isinstance(transfer, Transfer)
    return look(transfer.account)


FORMS = {
    name: task
    for name, task in list(globals().items())
    if name
    in {
        *("plain", "bound", "own_call_with_super", "own_call_without_super", "annotated"),
        *("own_call_in_a_mixin", "class_based", "inherited", "untyped", "key_from_a_callable"),
        "key_from_a_method",
    }
}


class Hooked(LockedTask):
    """Writes down at each hook whether the lock is held."""

    lock_key = KEY

    def _tell(self, hook: str, account: str) -> None:
        try:
            mine = bool(self.lock)
        except RelockError:
            mine = False
        journal.add(hook, account=account, holds=holds(f"account:{account}"), mine=mine)

    def before_start(self, task_id, args, kwargs):
        self._tell("before_start", args[0])

    def on_success(self, retval, task_id, args, kwargs):
        self._tell("on_success", args[0])

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        self._tell("on_failure", args[0])

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        self._tell("after_return", args[0])


@app.task(base=Hooked, bind=True)
def hooked(self, account, fail=False):
    self._tell("body", account)
    if fail:
        raise ValueError(account)
    return self.request.id


@app.task(
    base=LockedTask,
    lock_key=KEY,
    bind=True,
    autoretry_for=(Exception,),
    retry_backoff=3,
    retry_jitter=False,
)
def autoretried(self, account):
    """Fails once, and leaves it to Celery to try again three seconds later."""
    journal.add("attempt", account=account, retries=self.request.retries, fence=self.lock.fence)
    if self.request.retries == 0:
        raise ValueError("the first attempt")
    return self.request.retries


@app.task(
    bind=True,
    base=LockedTask,
    lock_key=KEY,
    lock_on_conflict="raise",
    autoretry_for=(LockConflict,),
    retry_kwargs={"countdown": 0.3, "max_retries": 100},
)
def autoretried_after_a_conflict(self, account):
    return self.request.retries


@app.task(base=LockedTask, lock_key=KEY, bind=True)
def held_until(self, account):
    journal.add("held", account=account)
    journal.wait_for(f"free {account}", 20)


@app.task(base=LockedTask, lock_key=KEY, bind=True)
def with_children(self, account):
    """Celery looks for what a task has sent in the request that the tracer made."""
    plain.delay(account)
    return [id(self.request) == id(self.request_stack.stack[0]), len(self.request.children)]
