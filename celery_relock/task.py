"""LockedTask: a Celery task class whose executions hold a lock."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import timedelta
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from celery import Task
from celery.app.task import Context

from . import debounce
from .declaration import (
    Declaration,
    declaration,
    declare_anew,
    engine_of,
    not_executed,
    refuse_settings,
)
from .dedup import client as dedup
from .engine import ids
from .engine.hold import Hold
from .errors import LockConfigError, RelockError
from .naming.callables import read_signature
from .naming.names import bind
from .order import client as order
from .worker import company, publishing  # noqa: F401  # a receiver
from .worker.delivery import DELIVERY
from .worker.message import (
    HEADER,
    OPTIONS,
    PREFIX,
    Header,
    attempt_before,
    has_to_be_sent,
    parse,
    prefix_of,
    refuse,
    take_options,
)
from .worker.states import Aside, SentAgain, defer_started
from .workflow import steps

if TYPE_CHECKING:
    from celery import Celery

    from .asyncio import Lock as CoroutineLock
    from .lock import Lock

Seconds: TypeAlias = float | timedelta
Mode: TypeAlias = Literal["exclusive", "shared"]


class NoLockHere(RelockError, AttributeError):
    """There is no `self.lock`. Whatever reads all attributes of a task, as a mock with its spec and
    `inspect.getmembers` do, goes on where one is missing."""


class LockedTask(Task):  # type: ignore[misc]  # Celery ships no types
    """Base class for tasks that hold a lock while their body runs.

        @app.task(base=LockedTask, lock_key="account:{account_id}")
        def charge(account_id, amount): ...

    The lock is released however the body ends, before Celery publishes the next step of a chain or
    stores the result. So when you see the result, the lock is free.

    The lock lies around `run`. A subclass's own `__call__`, `before_start` and `on_*` methods run
    outside of it, and so does what another library puts around them.

    The page "Options" has every option. Each is checked when the task is declared.
    """

    abstract = True

    lock_key: Any
    lock_owner: Any
    lock_reentrant: Literal["inline", "descendants", "workflow"]
    lock_limit: int | Callable[..., int] | list[int] | tuple[int, ...] | Mapping[Any, int]
    lock_mode: Mode | Callable[..., str] | list[Mode] | tuple[Mode, ...]
    lock_ttl: Seconds
    lock_cooldown: Seconds | None
    lock_on_conflict: Literal["wait", "block", "retry", "drop", "raise"] | Callable[..., str]
    lock_max_wait: Seconds | None
    lock_max_parked: int
    lock_order: Literal["sent"] | None
    lock_order_gap: Seconds
    lock_order_retry: Literal["keep", "end"]
    lock_keep_on_retry: bool
    lock_dedup: Literal["until_start", "until_done"] | Seconds | None
    lock_on_duplicate: Literal["existing", "raise", "drop", "replace"]
    lock_debounce: Seconds | None
    lock_debounce_max: Seconds | None
    lock_debounce_reduce: Any
    lock_hold: Literal["task", "workflow"]
    lock_gap_ttl: Seconds
    lock_on_gap: Literal["tell", "raise"]
    lock_on_lost: Literal["flag", "raise"]
    lock_on_unavailable: Literal["raise", "retry", "run"]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _lock_run(cls)
        _check_call(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Looked up at each call: a worker replaces Task.__call__ after this class was made.
        return super().__call__(*args, **kwargs)

    def push_request(self, *args: Any, **kwargs: Any) -> None:
        # What Celery does from 5.5 on. With the one of 5.4, a task that has a `__call__` sees a
        # request without an id where no worker protects it: eager, and in a test's `start_worker`.
        self.request_stack.push(Context(*args, **{**vars(self.request), **kwargs}))

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        """Send the task, as Celery's `apply_async` does, unless the call is a duplicate
        (`lock_dedup`), or is merged with later calls (`lock_debounce`).

        Options of the lock can be given for this call, instead of the task's own:
        `lock_on_conflict`, `lock_max_wait`, `lock_ttl`, `lock_dedup`, `lock_on_duplicate`,
        `lock_max_parked`, `lock_keep_on_retry`, `lock_on_lost`, `lock_on_unavailable`,
        `lock_cooldown`, `lock_debounce`, `lock_debounce_max`. They travel in the message, through
        waits and retries. `lock_dedup=False` sends the call in any case; `lock_debounce=False`
        sends it at once.

        Returns:
            The AsyncResult of the call. For a duplicate, the AsyncResult of the first call; or an
            EagerResult, with `lock_on_duplicate="drop"`. For a call of a burst, the AsyncResult of
            the execution for which all its calls are merged.

        What Celery itself sends, such as the next step of a chain or a retry, is no duplicate, and
        is sent whatever is wrong with it: it fails in the worker.

        Raises:
            DuplicateTask: the call is a duplicate, with `lock_on_duplicate="raise"`.
            LockConfigError: an option has a value that cannot be used, or cannot be given for one
                call, such as `lock_key` and `lock_limit`.
            LockUnavailable: Redis cannot be reached, with `lock_on_unavailable="raise"`.
        """
        options.update(
            task_id=task_id, producer=producer, link=link, link_error=link_error, shadow=shadow
        )
        publish: Callable[..., Any] = super().apply_async
        try:
            declared = self._declared_for(options)
        except LockConfigError as error:
            refuse(options, error)
            return publish(args, kwargs, **options)
        of = declared.options
        is_plain = of.dedup is None and of.order is None and not of.debounce
        if is_plain or declared.rule.off or self.app.conf.task_always_eager:
            return publish(args, kwargs, **options)
        mark = None
        if of.order is not None:
            publish = placer = order.Placer(self, declared, publish)
            mark = placer.mark
        sending = dedup.Sending(self, declared, publish, args, kwargs, options)
        return debounce.send(sending) if of.debounce else dedup.send(sending, mark)

    def _declared_for(self, options: dict[str, Any]) -> Declaration:
        """What is declared for a call with these options, among which what its message is to say
        takes the place of its `lock_*` options. Raises LockConfigError."""
        refuse_settings(options, f"a call of {self.name}")
        declared = declaration(type(self))
        before = attempt_before({"id": options["task_id"], **options}, options.get("headers"))
        prefix = None if before is None else before.prefix
        prefix = prefix_of(declared.prefix) if prefix is None else prefix
        if prefix is not None:
            options.setdefault(PREFIX, prefix)
        own = take_options(options)
        # What Celery sends has the options of when its canvas was made.
        is_sent = bool(own) and has_to_be_sent(options)
        declared = declared.of_call(own, options.get(PREFIX), is_sent=is_sent)
        if carried := {name: said for name, said in own.items() if not name.startswith("debounce")}:
            options[OPTIONS] = carried
        return declared

    def apply(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Run the task here and now, under its lock, as Celery's `apply`.

        Options of the lock are given as for `apply_async`.

        Returns:
            The EagerResult. An error of the lock is the task's error, as one of its body is.

        Raises:
            LockConfigError: as for `apply_async`.
        """
        refuse_settings(options, f"a call of {self.name}")
        declared, own = declaration(type(self)), options.pop(OPTIONS, {}) | take_options(options)
        prefix, headers = options.pop(PREFIX, None), options.get("headers") or {}
        if before := parse(headers.get(HEADER)) if options.get("retries") else None:
            own, prefix = {**before.options, **own}, before.prefix
        prefix = prefix_of(declared.prefix) if prefix is None else prefix
        declared.of_call(own, prefix)
        if own or prefix is not None:
            told = Header(ids.new_id(), options=own, prefix=prefix)
            options["headers"] = {**headers, HEADER: told.content()}
        return super().apply(args, kwargs, *more, **options)

    def lock_for(self, *args: Any, **kwargs: Any) -> Lock:
        """Return the `Lock` of a call with these arguments, for a view, a command or a script.

            with charge.lock_for(42, amount=5):
                ...

        It has the app's Redis, namespace and prefix, and the task's lease, limit, mode and longest
        wait. Nothing is acquired until you use it.

        Returns:
            A `celery_relock.Lock` that is not acquired.

        Raises:
            TypeError: the task cannot be called with these arguments.
            LockConfigError: the call has no lock, or several.
        """
        from .lock import Lock

        return Lock(**self._lock_for(args, kwargs))

    def async_lock_for(self, *args: Any, **kwargs: Any) -> CoroutineLock:
        """Return the same lock for a coroutine.

            async with charge.async_lock_for(42, amount=5):
                ...

        Returns:
            A `celery_relock.asyncio.Lock` that is not acquired. Raises as `lock_for` does.
        """
        from .asyncio import Lock

        return Lock(**self._lock_for(args, kwargs))

    def _lock_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        declared = declaration(type(self))
        declared = declared.of_call({}, prefix_of(declared.prefix))
        arguments = bind(self, args, kwargs)
        with not_executed(self):
            limits = declared.limits(arguments)
        if len(limits) != 1:
            raise LockConfigError(
                f"task {self.name}: this call has {len(limits)} locks"
                + (f" ({', '.join(map(repr, limits))})" if limits else ", as lock_key is False")
                + ", and lock_for() is for a task with one."
                + (" Acquire a Lock for each name." if limits else "")
            )
        ((name, limit),) = limits.items()
        return {
            "redis": engine_of(declared.app),
            "name": name,
            "timeout": declared.options.ttl,
            "blocking_timeout": declared.options.max_wait,
            "limit": limit or 1,
            "mode": "exclusive" if limit else "shared",
        }

    def marked(self, *args: Any, **kwargs: Any) -> Any:
        """Return the AsyncResult of the call of which this call would be a duplicate, or None.

        Raises:
            TypeError: the task cannot be called with these arguments.
            LockUnavailable: Redis cannot be reached.
        """
        return dedup.marked(self, args, kwargs)

    def unmark(self, *args: Any, **kwargs: Any) -> bool:
        """Let the next such call be sent, although an equal call is queued, runs, or was lost.

        Returns:
            True if a call was marked; False if none was. Raises as `marked` does.
        """
        return dedup.unmark(self, args, kwargs)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Celery's `retry`; not of a call that is parked or sent again, and comes by itself."""
        company.keep_aside(self)
        return super().retry(*args, **kwargs)

    def on_replace(self, sig: Any) -> Any:
        """Called by Celery for `self.replace(sig)`: the lock of a workflow goes on to `sig`."""
        steps.on_replace(self.request, sig)
        return super().on_replace(sig)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Called by Celery when the task gets its app: the moment at which it is declared."""
        super().on_bound(app)
        # The setting task_annotations may have put something in their place.
        _lock_run(cls)
        _check_call(cls)
        if cls.run is not Task.run:
            if not cls.name:
                declare_anew(cls)  # it may be another task of the class that was registered now
            declaration(cls)
            defer_started(cls)
            # By name: a process that only sends loads neither these steps nor `execution`.
            app.steps["worker"].add("celery_relock.worker.bootstep:Locks")
            app.steps["consumer"].add("celery_relock.worker.resuming:ResumeQueues")

    def _relock_declares(self) -> bool:
        """Whether this task has a lock."""
        return not declaration(type(self)).rule.off

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.startswith("lock_"):
            declare_anew(type(self))

    def __delattr__(self, name: str) -> None:
        # Which is how pytest's monkeypatch and unittest.mock undo what they have set.
        super().__delattr__(name)
        if name.startswith("lock_"):
            declare_anew(type(self))

    @property
    def lock(self) -> Hold:
        """The hold of the call that runs now.

        Raises:
            RelockError: this task does not hold a lock here.
        """
        from .worker import execution

        hold = execution.current(self)
        if hold is None:
            raise NoLockHere(
                f"{self.name} holds no lock here: self.lock is there while the body runs, in the "
                "thread that runs it, and only if lock_key is not False"
            )
        return hold


def _lock_run(cls: type[LockedTask]) -> None:
    """Put the lock around the class's `run`, its own or that of a mixin."""
    run = inspect.getattr_static(cls, "run")
    if run is not Task.run and getattr(run, "__code__", None) is not _CODE:
        cls.run = _locked(run)


def _check_call(cls: type[LockedTask]) -> None:
    """See how the class's `__call__` ends, its own or that of a mixin or another base class."""
    if getattr(cls.__call__, "__code__", None) is not _CHECKED:
        cls.__call__ = _checked(cls.__call__)  # type: ignore[method-assign]


# The `task` that is called here, and whether its `run` was `reached`: an object, as the body can
# run in a copy of this context.
_call: ContextVar[SimpleNamespace | None] = ContextVar("relock_call", default=None)


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    """A class's `__call__`, which may end without a call of `run`, or handle what tells that the
    call is set aside: Celery would go on as if the body had run."""

    @wraps(call)
    def __call__(self: LockedTask, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        here = _call.get()
        if here is None or here.task is not self or here.reached:  # else of a class derived from it
            here = SimpleNamespace(task=self, reached=False)
        token = _call.set(here)
        try:
            try:
                result = call(self, *args, **kwargs)
            finally:
                _call.reset(token)
        except (Aside, SentAgain):
            raise
        except Exception:  # also a signal's, that strikes where what tells it passes by
            company.keep_aside(self)
            raise
        delivery = getattr(self.request_stack.top, DELIVERY, None)
        if delivery is not None and delivery.aside:
            company.keep_aside(self)
        if not here.reached:
            company.see_that_it_began(self)
        return result

    return __call__


def _locked(body: Any) -> Callable[..., Any]:
    function = getattr(body, "__func__", body)  # of a staticmethod

    @wraps(function)
    def run(self: LockedTask, *args: Any, **kwargs: Any) -> Any:
        if (here := _call.get()) is not None and here.task is self:
            here.reached = True
        call = body.__get__(self, type(self)) if hasattr(body, "__get__") else body
        from .worker import execution  # who only sends never loads it

        own = declaration(type(self))
        return execution.run(execution.Execution(self, own, run, call, args, kwargs))

    if isinstance(body, staticmethod):
        # What shows its signature drops the first parameter, as of any method.
        try:
            shown = read_signature(function)
        except ValueError:
            return run
        if "self" in shown.parameters:
            where = f"{function.__module__}.{function.__qualname__}"
            raise LockConfigError(
                f"the task {where} has a parameter called self: add bind=True, to get the task"
            )
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        both = shown.replace(parameters=[me, *shown.parameters.values()])
        run.__signature__ = both  # type: ignore[attr-defined]
    return run


# What tells ours from another function: a wrapper of it may copy its name and attributes.
_CODE = _locked(Task.run).__code__
_CHECKED = _checked(Task.__call__).__code__
_check_call(LockedTask)
