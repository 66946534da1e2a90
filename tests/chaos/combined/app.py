"""The workers' and the sender's side of a round: the tasks of the workload, each of them twice,
`t<n>` with its lock and `p<n>`, its twin, without."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import chain, chord, group
from celery.exceptions import Ignore, Reject
from celery.result import EagerResult, allow_join_result
from celery.signals import task_postrun, task_prerun

from celery_relock import Lock, LockedTask, locked
from celery_relock.errors import LockDeadlock
from tests.chaos.combined.workload import Canvas, Declared, Node, Round, Step
from tests.chaos.parked.settings import Settings
from tests.support import Journal

settings = Settings.from_environment()
round_ = Round.from_environment()
workload = round_.workload()
STEPS = {step.id: step for step in workload.steps()}
app = settings.app()
queue = app.conf.task_default_queue
app.conf.update(result_extended=True, **workload.conf)
resource = redis.Redis.from_url(settings.resource)
_journals: dict[int, Journal] = {}


def tell(what: str, **told: Any) -> None:
    if os.getpid() not in _journals:
        _journals[os.getpid()] = Journal(settings.resource, settings.namespace)
    _journals[os.getpid()].add(what, **told)


# -- what is sent


def _own(options: dict[str, Any], prefix: str) -> dict[str, Any]:
    made = {k: v for k, v in options.items() if prefix == "t" or not k.startswith("lock_")}
    return {**made, **({"queue": f"{queue}-other"} if "queue" in made else {})}


def _arguments(step: Step) -> dict[str, Any]:
    return {"key": step.key, "step": step.id}


def task_of(step: Step, prefix: str) -> Any:
    return app.tasks[f"{prefix}{step.task}"]


def build(node: Node, prefix: str) -> Any:
    if isinstance(node, Step):
        return _signature(node, prefix)
    if node.kind in ("starmap", "chunks"):
        return _mapped(node, prefix)
    parts = [build(part, prefix) for part in node.parts]
    if node.kind == "locked":
        return locked(parts[0], key=node.key, **node.options) if prefix == "t" else parts[0]
    if node.kind == "chord":
        assert node.body is not None
        return chord(parts, build(node.body, prefix))
    made = chain(*parts) if node.kind == "chain" else group(parts)
    for errback in node.errbacks:
        made.link_error(build(errback, prefix))
    return made


def _signature(step: Step, prefix: str) -> Any:
    task = task_of(step, prefix)
    made = (task.si if step.immutable else task.s)(**_arguments(step))
    made.set(**_own(step.options, prefix))
    for link in step.links:
        made.link(build(link, prefix))
    for errback in step.errbacks:
        made.link_error(build(errback, prefix))
    return made


def _mapped(canvas: Canvas, prefix: str) -> Any:
    steps = [part for part in canvas.parts if isinstance(part, Step)]
    task, calls = task_of(steps[0], prefix), [(None, step.key, step.id) for step in steps]
    return task.starmap(calls) if canvas.kind == "starmap" else task.chunks(calls, 1).group()


def send(node: Node, prefix: str, options: dict[str, Any], by_name: bool = False) -> Any:
    if by_name and isinstance(node, Step):
        plain = _own({**node.options, **options}, "p")
        return app.send_task(f"{prefix}{node.task}", kwargs=_arguments(node), **plain)
    return build(node, prefix).apply_async(**options)


def tell_sent(result: Any, item: int | str, prefix: str, *, by: str = "", number: int = 0) -> None:
    told = {"item": int(item), "prefix": prefix, "by": by, "number": number}
    tell("sent", **told, tasks=leaves(result))


def leaves(result: Any) -> list[str]:
    """The ids of all results in one."""
    if hasattr(result, "results"):
        return [leaf for each in result.results for leaf in leaves(each)]
    return [] if isinstance(result, EagerResult) else [result.id]


# -- what bodies do


class _Body:
    """A body at work, with a method for each kind of act."""

    def __init__(self, task: Any, step: Step, key: str, entry: str) -> None:
        self._task, self._step, self._key, self._entry = task, step, key, entry
        self._prefix = task.name[0]

    def run(self) -> None:
        for act, *arguments in self._step.acts:
            getattr(self, f"_{act}")(*arguments)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _fail(self, error: type[Exception]) -> None:
        raise error(f"asked of {self._step.id}")

    def _fail_until(self, retries: int) -> None:
        if self._task.request.retries < retries:
            self._fail(ValueError)

    def _retry(self, countdown: float, times: int, key: str | None) -> None:
        if self._task.request.retries < times:
            how = {"kwargs": {**_arguments(self._step), "key": key}} if key else {}
            raise self._task.retry(countdown=countdown, max_retries=None, **how)

    def _ignore(self) -> None:
        raise Ignore

    def _reject(self, requeue: bool) -> None:
        if not requeue or self._is_first("reject"):
            raise Reject(f"asked of {self._step.id}", requeue=requeue)

    def _replace(self, node: Node) -> None:
        raise self._task.replace(build(node, self._prefix))

    def _add(self, node: Node, _: bool) -> None:
        if self._task.request.chord:
            self._task.add_to_chord(build(node, self._prefix))

    def _call(self, step: Step, swallows: bool) -> None:
        try:
            task_of(step, self._prefix)(**_arguments(step))
        except Exception as error:
            self._tell_deadlock(step, error)
            if not swallows:
                raise

    def _apply(self, step: Step, _: bool) -> None:
        result = task_of(step, self._prefix).apply(kwargs=_arguments(step))
        self._tell_deadlock(step, result.result)

    def _tell_deadlock(self, step: Step, error: object) -> None:
        if isinstance(error, LockDeadlock):
            tell("deadlock", step=step.id, error=str(error))

    def _send(self, node: Node, countdown: float, asks: str) -> None:
        result = send(node, self._prefix, {"countdown": countdown} if countdown else {})
        tell_sent(result, self._step.id.partition(".")[0], self._prefix, by=self._step.id)
        if asks == "revoke":
            result.revoke()
        elif asks == "get":
            with allow_join_result():
                try:
                    result.get(timeout=2, propagate=False)
                except Exception as error:
                    tell("unanswered", step=self._step.id, error=repr(error)[:200])

    def _kill(self) -> None:
        if round_.pool == "prefork" and self._is_first("kill"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _kill_after(self, seconds: float) -> None:
        if round_.pool == "prefork" and self._is_first("kill"):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def _downgrade(self) -> None:
        if self._prefix == "t":
            try:
                self._task.lock.downgrade()
            except Exception as error:
                tell("not downgraded", step=self._step.id, error=repr(error)[:200])
            else:
                tell("downgraded", entry=self._entry)

    def _by_hand(self) -> None:
        if self._prefix != "t":
            return
        name = f"z:{self._key}"
        with Lock(settings.locks, name, namespace=settings.namespace, timeout=3) as lock:
            locks = [(name, 1, "exclusive")]
            with _inside(self._step.id, locks, prefix="t", fences={name: lock.fence}):
                time.sleep(0.02)

    def _is_first(self, what: str) -> bool:
        """Whether no attempt of this step has done so yet."""
        name = f"{settings.namespace}:{what}:{self._prefix}:{self._step.id}"
        return bool(resource.set(name, 1, nx=True))


@contextmanager
def _inside(step: str, locks: list[tuple[str, int, str]], **told: Any) -> Iterator[str]:
    entry = uuid.uuid4().hex
    tell("enter", entry=entry, step=step, locks=locks, **told)
    done = False
    try:
        yield entry
        done = True
    finally:
        tell("leave", entry=entry, step=step, prefix=told["prefix"], done=done)


def _body(declared: Declared) -> Callable[..., Any]:
    def body(
        self: Any, before: object = None, key: str = "", step: str = "", merged: object = ()
    ) -> str:
        is_locked = self.name[0] == "t" and declared.lock["lock_key"] is not False
        told = {"prefix": self.name[0], "task": self.request.id, "retries": self.request.retries}
        if is_locked:
            told |= {"fences": dict(self.lock.fences), "in_order": self.lock.in_order}
        locks = declared.locks(key, step) if is_locked else []
        with _inside(step, locks, **told) as entry:
            at_work = _Body(self, STEPS[step], key, entry)
            if declared.is_async:
                _in_a_loop(at_work.run)
            else:
                at_work.run()
            if is_locked and self.lock.lost:
                tell("lost", entry=entry)
        return step

    return body


def _in_a_loop(run: Callable[[], None]) -> None:
    async def coroutine() -> None:
        run()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(coroutine())
    else:
        run()


for each in workload.tasks:
    app.task(name=f"p{each.number}", bind=True, **each.celery)(_body(each))
    _options = {**each.celery, **each.lock, "base": LockedTask}
    app.task(name=f"t{each.number}", bind=True, **_options)(_body(each))


@task_prerun.connect
def _asked(task_id: str, task: Any, kwargs: dict[str, Any], **_: Any) -> None:
    if step := kwargs.get("step"):
        tell("asked", task=task_id, step=step, prefix=task.name[0], retries=task.request.retries)


@task_postrun.connect
def _over(task_id: str, task: Any, kwargs: dict[str, Any], state: str, **_: Any) -> None:
    told = {"step": kwargs.get("step"), "prefix": task.name[0], "retries": task.request.retries}
    tell("over", task=task_id, state=state, **told)
