"""What a task declared: its options and the rule for its lock names, read once and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from celery import Task
from celery.exceptions import TaskPredicate
from celery.local import Proxy

from .engine.engine import Engine
from .engine.events import logger
from .engine.platform import Guard
from .errors import LockConfigError
from .naming.callables import by_name, read_signature
from .naming.names import NameRule, bind, seen, signature_of
from .naming.template import Template
from .options import OPTION_NAMES, LockOptions
from .settings import BackendSettings, backend_settings, enabled, name_prefix, read_by_tasks
from .worker.message import ENTER, forget_prefixes
from .worker.message import is_lockable as is_lockable  # for rooms that know no `worker`
from .worker.parking import Outbox

_PREFIX = "lock_"
_METHODS = ("lock_for",)  # of LockedTask, named like options
_KEPT = "__relock__"
# Where the bodies of Celery's own tasks (chord_unlock, map …) are from. These never lock, so that
# `Celery(task_cls=LockedTask)` is safe. Not by the name, which anybody can give to a task.
_OF_CELERY = "celery."
# The name of each option as a setting of the app, for all its tasks.
_SETTINGS = {f"relock_{name}": f"lock_{name}" for name in OPTION_NAMES}
# Options that nobody has on a task for another purpose: written so, the prefix was forgotten.
_WITHOUT_PREFIX = ("key", "dedup", "debounce", *(name for name in OPTION_NAMES if "_" in name))
# What an option may be written as by mistake, in small letters and without `_`; and what
# celery-once and celery-singleton call it.
_MEANT = {
    **{lock + name.replace("_", ""): name for name in OPTION_NAMES for lock in ("lock", "")},
    "once": "dedup",
    "uniqueon": "key",
    "raiseonduplicate": "on_duplicate",
}


@dataclass(slots=True)
class Declaration:
    """What one task class declared."""

    options: LockOptions
    rule: NameRule
    app: Any
    #: What stands before each lock name: the call's, or else what the app's `relock_prefix` says.
    prefix: str | Callable[[], str] = ""
    #: The app's settings that were read for it.
    settings: Mapping[str, object] = field(default_factory=dict)

    def of_call(
        self, options: Mapping[str, object], prefix: str | None, *, is_sent: bool = False
    ) -> Declaration:
        """The declaration for one call.

        Args:
            options: the `lock_*` options of the call, by their short names.
            prefix: of its lock names, None if the call does not say.
            is_sent: as for `LockOptions.of_call`.

        Raises:
            LockConfigError: an option that a single call cannot have, or a value that does not do.
        """
        if not options and prefix is None:
            return self
        return replace(
            self,
            options=self.options.of_call(options, is_sent=is_sent) if options else self.options,
            prefix=self.prefix if prefix is None else prefix,
        )

    def names(self, arguments: Mapping[str, object]) -> tuple[str, ...]:
        """The lock names of a call with these bound arguments. Raises as `NameRule.names`."""
        return self.rule.names(arguments, self.prefix_now())

    def names_of_call(self, task: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
        """The lock names of a call that is not executed here. Raises as `bind` and `names`."""
        arguments = bind(task, args or (), kwargs or {})
        with not_executed(task):
            return self.names(arguments)

    def limits(self, arguments: Mapping[str, object]) -> dict[str, int]:
        """The limit, or `SHARED`, of each lock name of a call with these bound arguments, in the
        order of `names`. Raises as `names` and as `LockOptions.limit_for`."""
        options, parts = self.options, self.rule.parts(arguments, self.prefix_now())
        names = sorted(parts)
        if isinstance(options.limit, int) and options.mode == "exclusive":
            return dict.fromkeys(names, options.limit)
        if not isinstance(options.limit, list | Mapping) and not isinstance(options.mode, list):
            return dict.fromkeys(names, options.limit_for(seen(arguments, self.rule.rest)))
        return {name: options.limit_of_parts(parts[name]) for name in names}

    def templates_like_others(self, task: Any) -> Iterator[tuple[int, str]]:
        """The templates of lock_key that can give the names of another task that has them, too, and
        their numbers: those that do not read the task itself."""
        # An argument goes before it.
        own = {"task", "self"} - signature_of(task).parameters.keys()
        for number, part in enumerate(self.options.parts):
            if isinstance(part, str) and own.isdisjoint(Template(part, self.options.task).names):
                yield number, part

    def prefix_now(self) -> str:
        """What stands before the lock names of a call that is made now. Raises LockConfigError."""
        return self.prefix() if callable(self.prefix) else self.prefix


@contextmanager
def not_executed(task: Any) -> Iterator[None]:
    """Around callables of a task that is not executed here: what ends a task would end the one that
    runs.

    Raises:
        LockConfigError: one raised `Ignore`, `Reject` or `Retry`.
    """
    try:
        yield
    except TaskPredicate as error:
        raise LockConfigError(
            f"task {task.name}: a callable among its lock_… options raised {error!r}, which ends a "
            "task, and this task does not run here"
        ) from error


# By app, and by which of its settings: None without locks.
_engines: WeakKeyDictionary[Any, tuple[BackendSettings | None, Engine]] = WeakKeyDictionary()
_declared: WeakSet[Any] = WeakSet()
_guard = Guard()


def engine_of(app: Any) -> Engine:
    """Where an app's locks live.

    Raises:
        LockConfigError: the app has no Redis, or its settings do not fit.
    """
    app = app._get_current_object() if isinstance(app, Proxy) else app
    known = _engines.get(app)
    if known is None:
        # Imported here: a process that only sends needs no connection to Redis.
        from . import engines

        place = _place_of(app)
        if place is None:
            engine = engines.engine_without_locks()
        else:
            engine = engines.engine_for(
                place.url, place.namespace, place.ssl, place.transport, place.replicas
            )
            engine.configure(place.remember, place.most_parked)
        with _guard.lock:  # another app may come to the same engine in another thread
            outbox = engine.parking.sender
            if not isinstance(outbox, Outbox):
                outbox = engine.parking.sender = Outbox(engine.backend.consumed)
            outbox.add(app)
        _engines[app] = known = place, engine
    return known[1]


def where(app: Any) -> str:
    """Where the locks of an app are, by which setting, without a password. Raises as
    `engine_of`."""
    from .engines import shown

    place = backend_settings(app)
    return f"{shown(place.url)} ({place.source}), namespace {place.namespace!r}"


def _place_of(app: Any) -> BackendSettings | None:
    return backend_settings(app) if enabled(app) else None


def forget_engine(app: Any) -> None:
    """The settings of an app have changed: where its locks live, and the prefix that plain messages
    carry, is read anew when next needed."""
    _engines.pop(app, None)
    forget_prefixes()


def forget_settings() -> None:
    """The settings of some app have changed: they are all read anew when next needed."""
    _engines.clear()
    forget_prefixes()
    for cls in list(_declared):
        declare_anew(cls)


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
    _declared.add(cls)
    return made


def locked_tasks(app: Any) -> list[Declaration]:
    """The declarations of those tasks of a finalized app that acquire a lock. Raises as
    `declaration`, if an option was set afterwards."""
    declared = [declaration(type(task)) for task in app.tasks.values() if is_lockable(task)]
    return [each for each in declared if not each.rule.off]


def refuse_late_settings(app: Any) -> None:
    """Raise LockConfigError if a locked task was declared before a setting that it reads, or a lock
    was used before a setting that says where it lives."""
    if (known := _engines.get(app)) and known[0] != (place := _place_of(app)):
        was, place = known[0] or BackendSettings(None), place or BackendSettings(None)
        changed = [name for name in was._fields if getattr(was, name) != getattr(place, name)]
        raise LockConfigError(
            f"settings: where the locks live ({', '.join(changed)}) was changed after a lock of "
            "the app had been used, which stays where it was. Set relock_… before"
        )
    now = read_by_tasks(app)
    for declared in locked_tasks(app):
        then = declared.settings
        for name in now.keys() | then.keys():
            if now.get(name) != then.get(name):
                raise LockConfigError(
                    f"settings: relock_{name} was set after task {declared.options.task} had been "
                    "declared, which does not know it. Set it before register_task, a task that is "
                    "declared with lazy=False, and whatever uses a task"
                )


def has_locks(app: Any) -> bool:
    """Whether a finalized app has locked tasks, or a Redis for canvases that are `locked`. Raises
    as `locked_tasks`."""
    if locked_tasks(app):
        return True
    try:
        engine_of(app)
    except LockConfigError:
        return False
    return True


def declare_anew(cls: type) -> None:
    """An option was set on the task afterwards: it is declared anew when it is next called."""
    setattr(cls, _KEPT, None)


def _declare(cls: Any) -> Declaration:
    app = cls.app  # which binds a class that nobody has registered, as Celery's own `delay` does
    task = _task_of(cls)
    name, signature = task.name, signature_of(task)
    # What the app's class for tasks, or an annotation, says of all their locks is not for this one.
    of_enter: dict[str, object] = {"lock_key": False, "lock_hold": "workflow"}
    written = of_enter if name == ENTER else _options(cls, task)
    settings = read_by_tasks(app)
    forget_prefixes()  # a plain message has that of the locked tasks
    defaults = {option: each for option, each in settings.items() if option in OPTION_NAMES}
    options = LockOptions.collect(written, defaults, name)
    key: Any = False if str(cls.__module__).startswith(_OF_CELERY) else options.key
    rule = NameRule.compile(key, name, signature, task)
    if not rule.off:
        refuse_protocol_1(app, f"task {name}")
        _refuse_coroutine(cls, name)
        _refuse_own_strategy(cls, name, options)
        for option in ("limit", "mode"):
            if callable(function := getattr(options, option)):
                where = f"task {name}: the callable in lock_{option}"
                # Refuses what would always fail.
                by_name(function, where, None if rule.rest else signature.parameters)
    return Declaration(options, rule, app, name_prefix(app), settings)


def _task_of(cls: Any) -> Any:
    """The task of a class. If the class has no name, Celery gives its task one."""
    if cls.name:
        return cls._app._tasks.get(cls.name) or cls()
    own = [task for task in list(cls._app._tasks.values()) if type(task) is cls]
    if len(own) == 1:
        return own[0]
    where = f"the task class {cls.__module__}.{cls.__qualname__}"
    if not own:
        raise LockConfigError(
            f"{where} has no name, and is not registered: app.register_task({cls.__name__}()) "
            "gives it one"
        )
    names = ", ".join(sorted(task.name for task in own))
    raise LockConfigError(
        f"{where} is registered as several tasks ({names}), and its options are those of one. "
        "Make a subclass for each"
    )


def refuse_protocol_1(app: Any, what: str) -> None:
    """Raise LockConfigError if an app sends messages that say nothing of their workflow."""
    if app.conf.task_protocol == 1:
        raise LockConfigError(
            f"{what}: messages of task_protocol=1 carry no workflow and no stamps. Take the "
            "setting off: 2 is Celery's default"
        )


def _refuse_coroutine(cls: Any, name: str) -> None:
    body = getattr(cls.run, "__wrapped__", None)  # what our own `run` calls
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
    if any(is_one(body) for is_one in kinds):
        raise unbegun(name)


def _refuse_own_strategy(cls: Any, name: str, options: LockOptions) -> None:
    """A class that receives its messages in its own way, such as that of celery-batches, runs its
    body for several of them, without saying for which."""
    if cls.Strategy == Task.Strategy:
        return
    for option in ("dedup", "order", "debounce"):
        if getattr(options, option):
            raise LockConfigError(
                f"task {name}: lock_{option}={getattr(options, option)!r} cannot be used, as the "
                f"class has its own Strategy ({cls.Strategy!r}): its body runs without a message, "
                "so nothing tells which call has run. Take the option off, or let another task "
                "call this one"
            )


def unbegun(task: str) -> LockConfigError:
    """The error for a body of which no line runs when it is called: its lines would run without the
    lock."""
    return LockConfigError(
        f"task {task}: its body is a coroutine (async def) or a generator, whose lines would run "
        "after the lock has been released. Make it a plain function, which runs the coroutine with "
        "asyncio.run(…); or set lock_key=False, and acquire a celery_relock.asyncio.Lock in it"
    )


def refuse_settings(names: Iterable[str], where: str) -> None:
    """Raise LockConfigError if an option is written as the app's setting for all tasks is.

    Args:
        names: those that are there.
        where: what has them, for the error.
    """
    for name in names:
        if name in _SETTINGS:
            raise LockConfigError(
                f"{where}: {name} is a setting of the app. Here the option is {_SETTINGS[name]}."
            )


def _options(cls: Any, task: Any) -> dict[str, object]:
    """Every `lock_*` attribute as it was written, on the class or, for this task alone, on it."""
    public = [name for name in dir(cls) if not name.startswith("_")]
    refuse_settings(public, f"task {task.name}")
    names = [name for name in public if name.startswith(_PREFIX) and name not in _METHODS]
    written = {name: _as_written(inspect.getattr_static(cls, name), task) for name in names}
    own = {name: value for name, value in vars(task).items() if name.startswith(_PREFIX)}
    for each in misnamed(task):
        logger.warning("%s", each.text)
    return {**written, **own}


class Misnamed(NamedTuple):
    """What a task was given that its lock does not know, and the option that it stands for."""

    text: str
    option: str


def misnamed(task: Any) -> Iterator[Misnamed]:
    """What a task has that is meant as an option of its lock, by another name."""
    cls = type(task)
    # What was given to a decorator is for nobody else.
    given = vars(cls).keys() if "__wrapped__" in vars(cls) else ()
    for name in dir(cls):
        if name.startswith(("_", _PREFIX)):
            continue
        plain = name.replace("_", "").lower()
        option = _PREFIX + _MEANT.get(plain, "")
        is_meant = plain.startswith("lock") or name in given or name in _WITHOUT_PREFIX
        if option != _PREFIX and is_meant and not hasattr(cls, option):
            has = f"task {task.name} has {name}={getattr(cls, name)!r:.80}"
            yield Misnamed(f"{has}, which is no option of its lock. The option is {option}", option)


def _as_written(value: Any, task: Any) -> Any:
    """An option's value as the task's author wrote it.

    A function given to `@app.task(lock_key=…)` is an attribute of the class, where to read it would
    make it a bound method. A function that asks for `self` was meant as a method: it gets the task.
    """
    if isinstance(value, staticmethod):
        return value.__func__
    if isinstance(value, classmethod):
        return partial(value.__func__, type(task))
    if inspect.isfunction(value) and next(iter(read_signature(value).parameters), "") == "self":
        return partial(value, task)
    return value
