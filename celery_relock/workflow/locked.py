"""`locked`: one permit of a lock for a whole canvas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import chain
from celery.canvas import Signature, chunks, maybe_signature
from celery.result import EagerResult
from celery.states import SUCCESS
from celery.utils import uuid

from ..engine import ids
from ..engine.protocol import MODES
from ..errors import LockConfigError
from ..naming.names import Misfit, NameRule, bind, signature_of
from ..naming.template import check_name
from ..options import LockOptions
from ..task import LockedTask as LockedTask  # the package's: who has it knows `enter`
from ..worker.message import CANVASES, ENTER, take_options
from ..worker.states import Dropped
from .enter import held, of_call
from .steps import OPTIONS, Step, stamp, steps_of

_ROUTE = ("queue", "exchange", "routing_key", "priority")
_CHUNKS = "celery.chunks"


def locked(canvas: Signature, *, key: Any, **options: Any) -> Signature:
    """Hold one permit of a lock from the first step of a canvas to the end of the last.

        locked(chain(fetch.s(42), parse.s(), store.s()), key="account:42").delay()

    Returns the chain of the task `celery_relock.enter` and the canvas. `enter` acquires the lock as
    any locked task does, by `on_conflict`. Each time you apply the canvas, it acquires its own
    permit. The steps can be any tasks, in workers that have loaded this library. The members of a
    group or a chord share the permit and run side by side.

    Args:
        canvas: a signature, chain, group, chord, map, starmap or chunks, or a part of a larger one.
        key: as `lock_key`: a name, a list of names, or a template or callable over the first step's
            arguments, as its signature has them.
        **options: `ttl`, `gap_ttl`, `max_wait` in seconds or as a timedelta, `on_gap`,
            `on_conflict`, `limit`, `mode`, `on_unavailable`: each as the option `lock_…` of a task.
            The settings of the worker's app are the defaults. A callable is an error, as it cannot
            travel in a message.

    Returns:
        A chain to apply, to link, to put into a larger canvas, or to store as JSON. A canvas
        without a step is returned as it is.

    Raises:
        LockConfigError: the canvas is not a signature, an option is unknown or cannot be used, or
            the key gives no name.
    """
    _check_canvas(canvas)
    declared = _checked(options)
    app = canvas.app
    steps = _without_chunks(canvas if canvas.task == _CHUNKS else canvas.clone())
    first = next(steps_of(steps), None)
    if first is None:
        return steps  # as nothing runs, nothing is to be locked
    lock = ids.new_id()
    stamp(steps, lock)
    names = _names(key, first, app)  # without their prefix, which is that of a call
    spec = {"id": lock, "unprefixed": names, "options": take_options(declared)}
    enter = app.tasks[ENTER].s(spec).set(**_route(first, app))
    return LockedChain((enter | steps).tasks, app=app)


class LockedChain(chain):  # type: ignore[misc]  # Celery ships no types
    """The chain that `locked` returns.

    Applied here and now, it holds the lock around all its steps.
    """

    def clone(self, *args: Any, **kwargs: Any) -> LockedChain:
        plain = super().clone(*args, **kwargs)
        return LockedChain(plain.tasks, app=self.app, **plain.options)

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        enter, *steps = self.tasks
        options = {**self.options, **options}
        spec = of_call(enter.args[-1], options)
        try:
            with held(self.app, spec):
                if len(steps) == 1 and "link" not in options:
                    # A chain of one chord would not pass its arguments on, in Celery 5.4.
                    return steps[0].apply(args, kwargs, **options)
                return chain(steps, app=self.app).apply(args, kwargs, **options)
        except Dropped as dropped:
            return EagerResult(uuid(), dropped.result, SUCCESS)


def _without_chunks(canvas: Any) -> Any:
    """Chunks become the group that they would be sent as, whose members are new signatures."""
    if canvas["task"] == _CHUNKS:
        # By the name: a chunks that was cloned or read is a plain signature.
        parts = canvas["kwargs"]
        return chunks(maybe_signature(parts["task"]), parts["it"], parts["n"]).group()
    inner = canvas["kwargs"]
    for name in CANVASES.get(canvas["subtask_type"], ()):
        part = inner[name]
        if isinstance(part, list | tuple):
            inner[name] = [_without_chunks(maybe_signature(each).clone()) for each in part]
        elif isinstance(part, Mapping):
            inner[name] = _without_chunks(maybe_signature(part).clone())
    return canvas


def _route(first: Step, app: Any) -> dict[str, Any]:
    """Where the first step itself says that it goes. `enter` asks the routes when it is sent."""
    task, own = app.tasks.get(first["task"]), first.get("options") or {}
    declared = {name: each for name in _ROUTE if (each := getattr(task, name, None)) is not None}
    return declared | {name: own[name] for name in _ROUTE if name in own}


def _names(key: Any, first: Step, app: Any) -> list[str]:
    where = f"locked({first['task']}, …)"
    if key is None or key is False:
        raise LockConfigError(f"{where}: key={key!r} names no lock. Give a name, or a template.")
    parts = key if isinstance(key, list | tuple) else (key,)
    if parts and all(isinstance(each, str) and "{" not in each for each in parts):
        return sorted({check_name(each, where) for each in parts})
    task = app.tasks.get(first["task"])
    if task is None:
        raise LockConfigError(
            f"{where}: the key reads arguments, and the first step is not a task of this app, so "
            "they have no names here. Give the finished name as key."
        )
    try:
        arguments = bind(task, first.get("args") or (), first.get("kwargs") or {})
    except Misfit as error:
        raise LockConfigError(
            f"{where}: the key reads the first step's arguments, and those in its signature are "
            f"not all there: {error} What a step gets from the one before it is not known when the "
            "canvas is made. Give the finished name as key."
        ) from error
    return list(NameRule.compile(key, where, signature_of(task)).names(arguments))


def _check_canvas(canvas: Any) -> None:
    if isinstance(canvas, Signature):
        return
    raise LockConfigError(
        f"locked(): {canvas!r:.100} ({type(canvas).__qualname__}) is not a signature. Write "
        "locked(task.s(…), key=…), locked(chain(…), …) or locked(group(…), …)."
    )


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as those of a task."""
    for name, value in options.items():
        if name not in OPTIONS:
            of_task = name.removeprefix("lock_")
            hint = f"It is called {of_task} here. " if of_task in OPTIONS else ""
            raise LockConfigError(
                f"locked(): there is no option {name}. {hint}The options are: key, "
                f"{', '.join(OPTIONS)}."
            )
        if callable(value):
            raise LockConfigError(
                f"locked(): {name} cannot be a callable, because it travels in a message."
            )
    # A task takes more: callables, and lists.
    limit, mode = options.get("limit", 1), options.get("mode", "exclusive")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise LockConfigError(
            f"locked(): limit={limit!r} cannot be used. It takes a whole number from 1."
        )
    if mode not in MODES:
        raise LockConfigError(
            f"locked(): mode={mode!r} cannot be used. It takes 'exclusive' or 'shared'."
        )
    declared = {f"lock_{name}": each for name, each in options.items()}
    LockOptions.collect({"lock_hold": "workflow", **declared}, {}, "locked()")
    return declared
