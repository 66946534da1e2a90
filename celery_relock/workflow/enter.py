"""The task that acquires a workflow lock: the first step of what `locked` returns.

It is parked while somebody else holds the lock, as any locked task is, and leaves its hold to the
steps behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from celery import Task, shared_task

from ..declaration import declaration, engine_of, refuse_protocol_1
from ..engine import reentrancy
from ..engine.engine import Engine
from ..engine.lease import Lease
from ..errors import LockConfigError
from ..naming.template import check_name
from ..options import CALL_OPTIONS, LockOptions
from ..settings import read_by_tasks
from ..task import LockedTask
from ..worker.conflict import Attempt, begins_unlocked, lease_of, obtain, release
from ..worker.message import ENTER, header_of, owner_of, prefix_of, take_options
from ..worker.states import Dropped, end_dropped, show_started
from . import steps


class EnterTask(LockedTask):
    """Sent like a first step: the arguments that come with it go to the steps behind it."""

    abstract = True
    # It goes where the first step goes, whatever the app's class says of its tasks.
    queue = exchange = routing_key = priority = None
    # Of one that ignores its result Celery would not fail the steps behind it, which may not.
    store_errors_even_if_ignored = True

    def __new__(cls) -> EnterTask:
        """Of the app's own class for tasks, too, as the tasks of Celery are: what that class does
        for each task, such as to go to the tenant that it was sent for, is done for the steps
        behind this one, which it sends."""
        made: EnterTask = super().__new__(type(cls.__name__, (cls, cls.app.Task), {}))
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not by that of the app's class: it may handle a conflict, or not call `run`, and then the
        # steps would run without their lock. They are sent after it, whatever it does around `run`.
        return Task.__call__(self, *args, **kwargs)

    def apply_async(  # type: ignore[override]  # sent by this library alone
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, **options: Any
    ) -> Any:
        refuse_protocol_1(self.app, "locked()")
        *given, spec = args
        *rest, first = options.get("chain") or (None,)
        if first is None:
            # Celery takes a chain that is all of a chord's header for the list of its members.
            raise LockConfigError(
                f"{ENTER} has no step behind it, so what locked() returned was taken apart. As the "
                "header of a chord it needs a list around it, chord([locked(…)], body); a locked "
                "group goes before a body as locked(group(…)) | body."
            )
        first = _with_arguments(first, given, kwargs or {})
        options["chain"] = [*rest, first]
        options.setdefault("router", _router(self.app, next(steps.steps_of(first))))
        spec = of_call(spec, options)
        return super().apply_async((spec,), {}, task_id, **options)

    def _relock_declares(self) -> bool:
        return True  # though it has no `lock_key`: a workflow's lock

    def names_of(self, spec: Mapping[str, Any], message: Any | None) -> Sequence[str]:
        """The lock names of a workflow, for its message or, with None, for a call here and now.
        Raises LockConfigError."""
        if "unprefixed" not in spec:
            names: Sequence[str] = spec["names"]  # of a canvas from before: with the prefix
            return names
        prefix = None if message is None else header_of(message).prefix
        if prefix is None:
            prefix = prefix_of(declaration(type(self)).prefix) or ""
        return [check_name(prefix + each, "locked()") for each in spec["unprefixed"]]

    def apply(self, *_: Any, **__: Any) -> Any:
        raise LockConfigError(
            "what locked() returned is part of a larger canvas that is applied here and now "
            "(apply(), task_always_eager), or was read from JSON before: nothing can hold its lock "
            "from its first step to its last. Apply it by itself, or lock the larger canvas: "
            "locked(chain(…), key=…)."
        )


def _router(app: Any, step: steps.Step) -> SimpleNamespace:
    """Where a step goes, the task that acquires goes: some worker is sure to be there."""
    asked = (step["task"], step.get("args"), step.get("kwargs"), app.tasks.get(step["task"]))
    return SimpleNamespace(route=lambda options, *_: app.amqp.router.route(options, *asked))


def of_call(spec: Mapping[str, Any], options: dict[str, Any]) -> Mapping[str, Any]:
    """A workflow lock as one call of its canvas asks for it.

    Args:
        spec: the lock, as `locked` wrote it.
        options: of the call. Those of the lock are taken out.

    Raises:
        LockConfigError: an option cannot be used, or has no meaning for a workflow lock.
    """
    own = take_options(options)
    LockOptions.collect(_declared(spec), {}, "locked()").of_call(own)
    for name in own:
        if name not in steps.OPTIONS:
            can = ", ".join(f"lock_{each}" for each in CALL_OPTIONS if each in steps.OPTIONS)
            raise LockConfigError(
                f"a call of locked(): the lock of a workflow has no lock_{name}. A single call can "
                f"have {can}."
            )
    return {**spec, "call": {**spec.get("call", {}), **own}} if own else spec


def _with_arguments(step: steps.Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> steps.Step:
    """A signature whose first tasks have their arguments, and take none from who sends them."""
    kind, inner = step.get("subtask_type"), step.get("kwargs") or {}

    def given_to(signatures: Any) -> list[Any]:
        return [_with_arguments(each, args, kwargs) for each in signatures]

    if kind == "chain":
        begins, *rest = inner["tasks"]
        return {**step, "kwargs": {**inner, "tasks": [*given_to([begins]), *rest]}}
    if kind == "group":
        return {**step, "kwargs": {**inner, "tasks": given_to(inner["tasks"])}}
    if kind == "chord":
        header = inner["header"]
        new = given_to([header])[0] if isinstance(header, Mapping) else given_to(header)
        return {**step, "kwargs": {**inner, "header": new}}
    if step.get("immutable"):
        return step
    with_args = {"args": (*args, *(step.get("args") or ())), "kwargs": {**inner, **kwargs}}
    return {**step, **with_args, "immutable": True}


@shared_task(name=ENTER, base=EnterTask, bind=True)  # type: ignore[untyped-decorator]
def enter(self: Any, *args: Any) -> Any:
    """Acquire a workflow lock and leave it to the steps that come next."""
    message = self.request
    try:
        if len(args) != 1:
            raise LockConfigError(
                f"{ENTER} was sent by a process that has not loaded celery_relock: each worker "
                "that runs a step before locked(…) needs it"
            )
        _acquire(self, message, args[0])
        show_started(self, message)
    except Dropped as dropped:
        return end_dropped(self, message, dropped)
    return None


def _acquire(task: Any, message: Any, spec: Mapping[str, Any]) -> None:
    options = _options(task.app, spec)
    engine, _, names = _missing(task, spec, options, message)
    if not names:
        return  # the workflow lock around this one holds them
    lease = _lease(engine, task, names, options, message)
    try:
        attempt = Attempt(task, engine, lease, options, message)
        if obtain(attempt) is not None:
            reentrancy.push(lease)
            lock = steps.WorkflowLock.of(spec["id"], lease, options)
            steps.begin(steps.StepHold(lock, engine, lease, message))
        else:  # lock_on_unavailable="run"
            begins_unlocked(attempt)
    finally:
        if not steps.owns(message, lease):
            release(engine, lease)


@contextmanager
def held(app: Any, spec: Mapping[str, Any]) -> Iterator[None]:
    """Hold a workflow lock around a canvas that is applied here and now.

    Raises:
        LockConflict: it was held for as long as `max_wait`.
        LockLost: a caller holds it no longer.
    """
    options, task = _options(app, spec), app.tasks[ENTER]
    engine, outer, names = _missing(task, spec, options, None)
    if not names:
        with reentrancy.Relying(outer.values()):
            yield
        return
    lease = _lease(engine, task, names, options, None)
    try:
        if obtain(Attempt(task, engine, lease, options, None)) is not None:
            reentrancy.push(lease)
        with reentrancy.Relying(outer.values()):
            yield
    finally:
        reentrancy.pop(lease)
        release(engine, lease)


def _options(app: Any, spec: Mapping[str, Any]) -> LockOptions:
    defaults = {name: each for name, each in read_by_tasks(app).items() if name in steps.OPTIONS}
    for name in ("limit", "mode", "on_conflict"):
        if not isinstance(defaults.get(name, ""), int | str):
            # Made for the arguments, or the parts of the key, of a task; or no message carries it.
            del defaults[name]
    options = LockOptions.collect(_declared(spec), defaults, "locked()")
    return options.of_call(spec.get("call", {}), is_sent=True)


def _declared(spec: Mapping[str, Any]) -> dict[str, Any]:
    own = {f"lock_{name}": value for name, value in spec["options"].items()}
    return {"lock_hold": "workflow", **own}


def _missing(
    task: Any, spec: Mapping[str, Any], options: LockOptions, message: Any | None
) -> tuple[Engine, Mapping[str, Lease], tuple[str, ...]]:
    """The engine, what a caller holds of the locks, and the names of the others."""
    engine, wanted = engine_of(task.app), task.names_of(spec, message)
    outer = reentrancy.covering(engine.backend, wanted, _limits(wanted, options))
    return engine, outer, tuple(name for name in wanted if name not in outer)


def _limits(names: Sequence[str], options: LockOptions) -> tuple[int, ...]:
    return (options.limit_for({}),) * len(names)


def _lease(
    engine: Engine, task: Any, names: tuple[str, ...], options: LockOptions, message: Any | None
) -> Lease:
    lease = lease_of(
        engine.lease,
        task,
        message,
        None if message is None else header_of(message),
        owner=owner_of("root", message),
        names=names,
        limits=_limits(names, options),
        lease=options.ttl,
        stuck=reentrancy.stuck(),
    )
    lease.of_workflow = True
    return lease
