"""`locked`: one entry into a lock for a whole canvas."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery.canvas import Signature, _chain, chunks, group, maybe_signature

from ..engine import ids
from ..errors import LockConfigError
from ..naming.arguments import bind, signature_of
from ..naming.names import NameRule, check_name
from ..options import LockOptions
from ..task import LockedTask as LockedTask
from . import enter as opening
from . import marks, members
from .enter import ENTER

_OPTIONS = ("ttl", "gap_ttl", "on_gap", "on_conflict", "max_wait", "limit")
_ROUTE = ("queue", "exchange", "routing_key", "priority")


def locked(canvas: Signature, *, key: Any, **options: Any) -> Signature:
    """The same canvas under one entry into a lock, from before its first step until after its last.

        locked(chain(fetch.s(42), parse.s(), store.s()), key="account:42").delay()

    A message of its own goes ahead, `celery_relock.enter`, which takes the lock as any locked task
    does: parked while somebody else has it, and so on by `on_conflict`. Each time the canvas is
    applied it is a section of its own. Its steps may be any tasks; those that are not `LockedTask`
    need workers that have loaded this module, else the entry lives for `gap_ttl` only while such a
    step runs. Groups and chords share the entry: their members run side by side.

    Args:
        canvas: a signature, chain, group, chord, map, starmap or chunks, or a part of a larger one.
        key: as `lock_key`: a name, a template over the first step's arguments as they are written
            in its signature, a callable of these, or a list.
        ttl, gap_ttl, on_gap, on_conflict, max_wait, limit: as the options `lock_…` of a task. The
            app's settings are the defaults. `on_conflict` and `limit` cannot be callables.

    Returns:
        a signature to apply, to link, to put into a larger canvas, or to store. For a group it is
        a group with as many members, which go together. What has no step comes back as it is.

    Raises:
        LockConfigError: an option is unknown or cannot be used, or the key gives no name.
    """
    section, app = ids.new_id(), canvas.app
    _check(options)
    marked = _without_chunks(canvas if canvas.task == _CHUNKS else canvas.clone())
    first = next(marks.steps(marked), None)
    if first is None:
        return marked  # as nothing runs, nothing is to be locked
    names = _names(key, first, app)
    own = {name: each for name, each in (first.get("options") or {}).items() if name in _ROUTE}
    spec = {
        "section": section,
        "names": list(names),
        "options": _plain(options),
        "route": {"task": first["task"], "options": own},
    }
    marks.mark(marked, section)
    if isinstance(marked, group):
        return _locked_group(marked, spec, app)
    return _behind_enter(marked, spec, app)


def _behind_enter(step: Any, spec: Mapping[str, Any], app: Any) -> _Locked:
    return _Locked.of(app.tasks[ENTER].s(spec) | step)


def _locked_group(marked: Any, spec: dict[str, Any], app: Any) -> Signature:
    """A group of as many members: Celery treats it by their number wherever it stands."""
    number = members.count(marked)
    if number == 1:
        alone = members.wrap(marked, lambda step: _behind_enter(step, spec, app))
        return members.LockedGroup.of(alone, spec)
    spec["members"] = number
    return members.LockedGroup.of(
        members.wrap(marked, lambda step: members.Member(step, spec, app=app)), spec
    )


_CHUNKS = "celery.chunks"


class _Locked(_chain):  # type: ignore[misc]  # Celery ships no types
    """The chain that `locked` returns. Applied here and now, it is one lock around the whole."""

    @classmethod
    def of(cls, chain: Any) -> _Locked:
        chain.__class__ = cls
        made: _Locked = chain
        return made

    def clone(self, *args: Any, **kwargs: Any) -> _Locked:
        return self.of(super().clone(*args, **kwargs))

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        enter, *rest = self.tasks
        with opening.held(self.app, enter["args"][-1]):
            all_options = {**self.options, **options}
            if len(rest) == 1 and "link" not in all_options:
                # A chain of one chord would not pass its arguments on, in Celery 5.4.
                return rest[0].apply(args, kwargs, **all_options)
            whole = _chain(*rest, app=self._app, **self.options)
            return whole.apply(args, kwargs, **options)


def _without_chunks(canvas: Any) -> Any:
    """Chunks become the group that they would be sent as, whose members are new signatures."""
    if canvas["task"] == _CHUNKS:
        # By the name: a chunks that was cloned or read is a plain signature.
        parts = canvas["kwargs"]
        return chunks(maybe_signature(parts["task"]), parts["it"], parts["n"]).group()
    inner = canvas["kwargs"] if isinstance(canvas, Mapping) else {}
    for name in ("tasks", "header", "body"):
        part = inner.get(name)
        if isinstance(part, list | tuple):
            inner[name] = [_without_chunks(maybe_signature(each).clone()) for each in part]
        elif isinstance(part, Mapping):
            inner[name] = _without_chunks(maybe_signature(part).clone())
    return canvas


def _names(key: Any, first: Any, app: Any) -> tuple[str, ...]:
    where = f"locked({first['task']}, …)"
    if key is None or key is False:
        raise LockConfigError(f"{where}: key={key!r} names no lock. Give a name, or a template.")
    parts = key if isinstance(key, list | tuple) else (key,)
    if parts and all(isinstance(each, str) and "{" not in each for each in parts):
        return tuple(sorted({check_name(each, where) for each in parts}))
    task = app.tasks.get(first["task"])
    if task is None:
        raise LockConfigError(
            f"{where}: the key reads arguments, and the first step is no task of this app, so they "
            "have no names here. Give the finished name as key."
        )
    arguments = bind(task, first.get("args") or (), first.get("kwargs") or {})
    if arguments is None:
        raise LockConfigError(
            f"{where}: the key reads the first step's arguments, and those in its signature are "
            f"not all there: {first!r:.200}. What a step gets from the one before it is not known "
            "when the canvas is made. Give the finished name as key."
        )
    return NameRule.compile(key, where, signature_of(task)).names(arguments)


def _check(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _OPTIONS:
            raise LockConfigError(
                f"locked(): there is no option {name}. There are: key, {', '.join(_OPTIONS)}."
            )
        if callable(value):
            raise LockConfigError(f"locked(): {name} cannot be a callable, it goes into a message.")
    LockOptions.collect({f"lock_{name}": each for name, each in options.items()}, {}, "locked()")


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.total_seconds() if isinstance(value, timedelta) else value
        for name, value in options.items()
    }
