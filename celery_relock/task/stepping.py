"""Steps of a section that are no locked tasks: a worker's tasks learn to keep the entry.

Only a task's `__call__` can refuse to run its body, and only a class that has one of its own is
called by it. So each task class of a worker that has none of ours gets one: it looks at the message
and, where that belongs to no section, is out of the way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Task
from celery.signals import celeryd_after_setup

from . import handing, sections
from .declaration import is_locked, locked_tasks


def keep_sections(cls: Any) -> None:
    """Let the tasks of a class hold the sections that their messages belong to."""
    if getattr(cls.__call__, "__code__", None) is not _STEP_CODE:
        cls.__call__, cls.on_replace = _step(cls.__call__), _replaced(cls.on_replace)


def _step(call: Callable[..., Any]) -> Callable[..., Any]:
    own = call is not Task.__call__

    # Not by functools.wraps: Celery calls no `__call__` that says it comes from Celery.
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        # A worker replaces Task.__call__; the one from before would run under a copied request.
        inner = partial(call if own else Task.__call__, self, *args, **kwargs)
        # Reached by super() from a subclass: that one's is around this already.
        if type(self).__call__ is not __call__:
            return inner()
        return sections.around(self, inner)

    return __call__


def _replaced(on_replace: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, sig: Any) -> Any:
        handing.replacing(self.request, sig)
        return on_replace(self, sig)

    return wrapped


def _teach(instance: Any = None, **_: Any) -> None:
    if not locked_tasks(instance.app):
        return  # nothing of ours is in use here
    for task in instance.app.tasks.values():
        if not is_locked(type(task)):
            keep_sections(type(task))


_STEP_CODE = _step(Task.__call__).__code__
# All tasks are known by now, and the pool has not begun.
celeryd_after_setup.connect(_teach, weak=False, dispatch_uid="celery_relock.stepping")
