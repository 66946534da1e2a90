"""How the section of a `locked` canvas begins: a task that takes its lock and hands it on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery import shared_task
from celery.exceptions import Ignore, Reject, Retry
from celery.result import EagerResult
from celery.signals import task_revoked

from ..declaration import engine_of
from ..engine import ids, reentrancy
from ..engine.engine import Engine
from ..engine.events import label_of
from ..engine.protocol import Claim
from ..errors import LockConfigError
from ..options import LockOptions
from ..settings import option_defaults
from ..task import LockedTask
from ..worker import conflict as conflicts
from ..worker import events as telling
from ..worker import headers
from ..worker.attempt import Attempt
from ..worker.owner import owner
from ..worker.release import give_back
from ..worker.states import Dropped, end_dropped
from . import handing, marks, together
from . import steps as sections
from .carried import carried_by

ENTER = "celery_relock.enter"
_PLACES = ("queue", "exchange", "routing_key")


class EnterTask(LockedTask):
    """Goes where the first step of its canvas goes: some worker is sure to be there."""

    abstract = True
    lock_key = False
    opens_sections = True

    def apply_async(  # type: ignore[override]  # whoever sends it is this library
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, **options: Any
    ) -> Any:
        _refuse_protocol_1(self.app)
        if not any(name in options for name in _PLACES):
            options = {**self._route(args[-1]["route"]), **options}
        return super().apply_async(args, kwargs, task_id, **options)

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        done = super().apply(args, kwargs, **options)
        if len(args or ()) < 2:
            done.__class__ = _Nothing
        return done

    def _route(self, first: Mapping[str, Any]) -> dict[str, Any]:
        own, task = dict(first["options"]), self.app.tasks.get(first["task"])
        if task is not None:
            own = {**{name: each for name in _PLACES if (each := getattr(task, name, None))}, **own}
        routed: dict[str, Any] = self.app.amqp.router.route(own, first["task"])
        return routed


class _Nothing(EagerResult):  # type: ignore[misc]  # Celery ships no types
    """The result of an eager step that passes nothing on; Celery asks whether there is one."""

    def __bool__(self) -> bool:
        return False


@shared_task(name=ENTER, base=EnterTask, bind=True)  # type: ignore[untyped-decorator]
def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the lock of a section and leave it to the steps that come next."""
    *given, spec = args
    message = self.request
    if message.is_eager or message.called_directly:
        return given[0] if given else None
    _refuse_protocol_1(self.app)
    try:
        _check_steps(message)
        _take(self, message, spec)
        if "members" in spec:
            together.send(self.app, message, tuple(given), kwargs)
        else:
            marks.feed(message.chain[-1], given, kwargs)
    except Dropped as dropped:
        return end_dropped(self, message, dropped)
    except (Ignore, Retry, Reject):
        raise
    except Exception as error:
        if "members" in spec:
            together.fail(self, message, error)
        raise
    return None


def _is_revoked(sender: Any = None, request: Any = None, terminated: Any = None, **_: Any) -> None:
    """It was revoked, or has expired, before it began: if it was parked, its place is free."""
    if sender.name != ENTER or terminated:
        return
    spec = request.args[-1]
    if "members" in spec:
        together.revoke(sender, request)
    handing.end_before_it_began(sender, request, spec["names"], spec["section"])


def _refuse_protocol_1(app: Any) -> None:
    if app.conf.task_protocol == 1:
        raise LockConfigError(
            "locked() needs stamps, which messages of task_protocol=1 do not carry: use protocol 2"
        )


def _check_steps(message: Any) -> None:
    """Celery takes a chain that is all of a chord's header apart: its steps run side by side."""
    if not message.chain:
        raise LockConfigError(
            f"{ENTER} has no step behind it, so what locked() returned was taken apart. As the "
            "header of a chord it needs a list around it: chord([locked(…)], body)."
        )


def _take(task: Any, message: Any, spec: Mapping[str, Any]) -> None:
    engine, options = engine_of(task.app), _options(task.app, spec)
    names = _missing(engine, spec)
    if not names:
        return  # the section around this one has it
    execution_id = sections.hold_id(headers.read(message).execution_id, spec["section"])
    label, ancestors = label_of(task.name, message.id), headers.ancestors_for(options)
    lease = engine.lease(
        _claim(execution_id, owner("root", message), names, options, label, ancestors)
    )
    lease.work = telling.work_for(task, message)
    try:
        held = sections.obtain(Attempt(task, engine, lease, options, message))
        if held is not None:
            reentrancy.push(lease)
            carried = carried_by(spec["section"], lease, held.fences, options)
            sections.begin(carried, engine, lease, message)
    finally:
        if not sections.owns(lease):
            give_back(engine, lease, ended=False)


@contextmanager
def held(app: Any, spec: Mapping[str, Any]) -> Iterator[None]:
    """Hold a section's lock around what is applied here and now.

    Raises:
        LockConflict: it was not to be had in time.
    """
    engine, options = engine_of(app), _options(app, spec)
    names = _missing(engine, spec)
    if not names:
        yield
        return
    label, ancestors = label_of("locked()", ""), headers.ancestors_for(options)
    lease = engine.lease(
        _claim(ids.new_id(), owner("root", None), names, options, label, ancestors)
    )
    try:
        taken = conflicts.obtain(Attempt(app.tasks[ENTER], engine, lease, options, None))
        if taken is not None:
            reentrancy.push(lease)
        yield
    finally:
        reentrancy.pop(lease)
        give_back(engine, lease, ended=False)


def _missing(engine: Engine, spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that nothing on this call stack holds yet."""
    names = tuple(spec["names"])
    return tuple(name for name in names if reentrancy.holding(engine.backend, name) is None)


def _options(app: Any, spec: Mapping[str, Any]) -> LockOptions:
    declared = {f"lock_{name}": value for name, value in spec["options"].items()}
    return LockOptions.collect(declared, option_defaults(app), "locked()")


def _claim(
    execution_id: str,
    owner: str,
    names: tuple[str, ...],
    options: LockOptions,
    label: str,
    ancestors: tuple[str, ...],
) -> Claim:
    limits = (options.limit_for({}),) * len(names)
    asked = Claim(
        execution_id,
        ids.new_attempt_id(),
        owner,
        names,
        limits,
        options.ttl,
        label,
        ancestors=ancestors,
    )
    return asked._replace(stuck=reentrancy.stuck())


task_revoked.connect(_is_revoked, weak=False, dispatch_uid="celery_relock.opening")
