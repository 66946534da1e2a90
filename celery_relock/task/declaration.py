"""What a task declared: its options and the rule for its lock names, read once and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .. import compose
from ..core.engine import Engine
from ..core.names import NameRule
from ..core.options import LockOptions
from .binding import signature_of
from .settings import option_defaults, store_settings

_PREFIX = "lock_"
_KEPT = "__relock__"
# Celery's own tasks (chord_unlock, map …) never lock: `Celery(task_cls=LockedTask)` is safe.
_BUILT_IN = "celery."


@dataclass(slots=True)
class Declaration:
    """The options of one task class, and its engine once a run has needed it."""

    options: LockOptions
    rule: NameRule
    app: Any
    _engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """Where the task's locks live.

        Raises:
            LockConfigError: the app has no Redis, or its settings do not fit.
        """
        if self._engine is None:
            found = store_settings(self.app)
            self._engine = compose.engine_for_url(found.url, found.namespace, found.ssl)
        return self._engine


def declaration(cls: Any) -> Declaration:
    """The declaration of a task class that is bound to its app.

    Raises:
        LockConfigError: an option is unknown, misspelt, contradictory or does not fit the task.
    """
    # Kept on the class itself: a subclass, and the class of another app, is a task of its own.
    found = cls.__dict__.get(_KEPT)
    if isinstance(found, Declaration) and found.app is cls._app:
        return found
    made = _declare(cls)
    setattr(cls, _KEPT, made)
    return made


def locked_tasks(app: Any) -> list[Declaration]:
    """The declarations of those tasks of a finalized app that take a lock."""
    kept = [type(task).__dict__.get(_KEPT) for task in app.tasks.values()]
    return [each for each in kept if isinstance(each, Declaration) and not each.rule.off]


def forget(cls: type) -> None:
    """An option was set on the task afterwards: it is declared anew when it is next called."""
    setattr(cls, _KEPT, None)


def _declare(cls: Any) -> Declaration:
    app, task = cls._app, cls._app._tasks.get(cls.name) or cls()
    options = LockOptions.collect(_options(cls, task), option_defaults(app), cls.name)
    key: Any = False if cls.name.startswith(_BUILT_IN) else options.key
    return Declaration(options, NameRule.compile(key, cls.name, signature_of(task)), app)


def _options(cls: type, task: Any) -> dict[str, object]:
    """Every `lock_*` attribute as it was written, on the class or, for this task alone, on it."""
    names = [name for name in dir(cls) if name.startswith(_PREFIX)]
    written = {name: _as_written(inspect.getattr_static(cls, name), task) for name in names}
    own = {name: value for name, value in vars(task).items() if name.startswith(_PREFIX)}
    return {**written, **own}


def _as_written(value: Any, task: Any) -> Any:
    """A function given to `@app.task(lock_key=…)` lands in the class, where reading it would make
    it a bound method. One that asks for `self` was meant as a method and gets the task."""
    if isinstance(value, staticmethod):
        return value.__func__
    if isinstance(value, classmethod):
        return partial(value.__func__, type(task))
    if inspect.isfunction(value) and _asks_for_self(value):
        return partial(value, task)
    return value


def _asks_for_self(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "self"
