"""The message that a locked task runs for: which one it is, what we write into it, and who is its
owner.

    which message    the requests on Celery's stacks
    the header       what we write into every message that is published, and read from each
    the prefix       of the lock names in a message, and in what is called from it
    ancestors        the executions whose holds a message may re-enter
    the owner        who may re-enter
    who sends        what Celery sends by itself, and what somebody waits for
    times            as messages and calls have them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import cache, wraps
from itertools import islice
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from celery import current_app
from celery._state import _get_active_apps, _task_stack
from celery.utils.time import maybe_iso8601, maybe_make_aware

from ..engine import ids, reentrancy
from ..engine.events import Work, logger
from ..errors import LockConfigError
from ..naming.callables import called
from ..settings import name_prefix
from .delivery import DELIVERY, Delivery, delivery_of, finish, known_delivery, to_finish

#: The name of our header in a message.
HEADER = "relock"
VERSION = 2
#: Options of a call that no broker sees: Celery passes what it does not know on as properties of
#: the message, and `write_header` takes them out. They have the call's `lock_*` options (Celery's
#: router leaves out one that is None), the prefix of its lock names, and header fields that the
#: caller has decided already.
OPTIONS, PREFIX, SAYS = "relock_options", "relock_prefix", "relock_header"
#: The task that acquires a workflow lock (see `workflow.enter`).
ENTER = "celery_relock.enter"
# Celery's tasks that call another task directly, for each of their items.
_MAPS = ("celery.map", "celery.starmap")
#: Where the arguments of a canvas have its parts, by its kind.
CANVASES: Mapping[str | None, tuple[str, ...]] = {
    "chain": ("tasks",),
    "group": ("tasks",),
    "chord": ("header", "body"),
}
# How many ancestors are passed on, the nearest first. Without a bound the message of a task that
# sends itself would become longer each time.
_MOST_ANCESTORS = 32
# Seconds since the epoch that are later than any clock says (the year 5138).
_LAST = 1e11
# An attribute of a request: our header, once it was read.
_PARSED = "relock_read"

# -- Which message -------------------------------------------------------------------------------

#: The executions whose bodies this call stack is inside of, the innermost last.
inside: ContextVar[tuple[Any, ...]] = ContextVar("relock_inside", default=())
# The message that Celery ends here (see `that_tells_its_end`).
_ended_here: ContextVar[Any] = ContextVar("relock_ended_here", default=None)


def running_request() -> Any | None:
    """The request of the message that this call stack runs for; None outside of any task."""
    for task in _task_stack.stack:
        for request in task.request_stack.stack:
            if request.id:
                return request
    return None


def running_task() -> Any:
    """The task of that request. The current app need not be its app."""
    stack = _task_stack.stack
    return next(task for task in stack if any(each.id for each in task.request_stack.stack))


@cache
def that_tells_its_end(base: type[Any]) -> type[Any]:
    """A class for a task's messages in a worker's main process, derived from Celery's or a user's,
    that notes which message is ended: one whose process is gone, or that was rejected or revoked.
    No task runs there, but Celery sends and calls error callbacks meanwhile, and the task's hooks.
    """

    def ends(name: str) -> Callable[..., Any]:
        end = getattr(base, name)

        @wraps(end)
        def ended(self: Any, *args: Any, **kwargs: Any) -> Any:
            token = _ended_here.set(self)
            try:
                return end(self, *args, **kwargs)
            finally:
                _ended_here.reset(token)

        return ended

    names = ("on_failure", "on_timeout", "revoked", "terminate")
    return type(base.__name__, (base,), {name: ends(name) for name in names})


def ended_request() -> Any | None:
    """The `celery.worker.request.Request` that is ended here and now; None if none is."""
    return _ended_here.get()


def work_for(task: Any, request: Any | None) -> Work:
    """What events say of the task that acquires a lock, by its request or in a direct call."""
    running = running_request() if request is None else request
    if running is None:
        return Work(task, task.name, "")
    return Work(task, task.name, running.id, running.hostname or "")


def begin_call(task: Any) -> tuple[Any, Delivery] | tuple[None, None]:
    """A task's body begins: mark the request that it begins for, and return it.

    The next call, from inside of the body, finds the mark and is a direct call, without a request
    of its own. Whatever stands between the tracer and the body may have pushed copies of the
    request, or put something else on Celery's stack of tasks. So all copies that have no mark get
    it, and nothing else is looked at.

    Returns:
        The request of a message or of `apply()`, and its delivery; two None for a direct call.
    """
    found = delivery = None
    for request in reversed(task.request_stack.stack):
        if found is None and request.id:
            found, delivery = request, getattr(request, DELIVERY, None) or Delivery()
            if delivery.begun:
                return None, None
        if found is not None and request.id == found.id and not hasattr(request, DELIVERY):
            request.headers = request.headers or {}
            setattr(request, DELIVERY, delivery)
    if found is None or delivery is None:
        return None, None
    if not found.is_eager:
        # Celery does not reset contexts between tasks: who was inside of a body that a signal has
        # struck would stay so.
        reentrancy.begin(found.id)
        if inside.get():
            inside.set(())
        if to_finish.stack:
            finish()  # nobody has said that those before it are over
    # Last, without a call behind it: of a message that a signal strikes before, what waits for it
    # is cleared away as of one whose body was not reached.
    delivery.begun = True
    return found, delivery


def has_begun(request: Any) -> bool:
    """Whether the body of this request's task was reached by way of its lock."""
    found = known_delivery(request)
    return found is not None and found.begun


def is_lockable(task: Any) -> bool:
    """Whether a task can have a lock: it is a `LockedTask`, or the one of `locked`."""
    return hasattr(task, "_relock_declares")


def body_runs(task_id: str) -> bool:
    """Whether the body of this locked task runs on this call stack.

    What Celery sends for the task before and after its body, such as the next step of a chain, is
    not sent by the body.
    """
    locked = [each for each in inside.get() if is_lockable(each.task)]
    return any(each.request is not None and each.request.id == task_id for each in locked)


def is_retry(fields: Mapping[str, Any], request: Any) -> bool:
    """Whether a message is the running task's retry, and not what the task is replaced by."""
    nesting = fields.get("replaced_task_nesting") or 0
    same: bool = fields.get("id") == request.id
    return same and nesting == (request.replaced_task_nesting or 0)


def retried_by(fields: Mapping[str, Any]) -> Delivery | None:
    """The delivery whose retry a message is that is published here, None if it is none's."""
    running = running_request()
    if running is None or not is_retry(fields, running):
        return None
    return delivery_of(running)


# -- The header ----------------------------------------------------------------------------------
#
# It tells a second copy of a message (the same execution) from a message that was sent again, which
# is another execution. The task id cannot: a retry has the same, and so has a task that a person
# sends again with its old id. Every process that has loaded the library writes the header into each
# message that it publishes.
#
# An execution whose lock is held is sent again as the *same* execution, as nothing of it was
# executed yet. So a copy of its first message that comes later is recognised.
#
# What else is made from an execution id:
#
#     first               the id that was made from the task id, before it got one of its own
#     attempt_id          not made from it: random, for each try to execute the message (`Claim`)
#     conflict.again_of   late copies of it that have to run do so under this one
#     marker.hold_id      holds its dedup marker
#     steps.hold_id       holds a lock of its workflow
#     COOLDOWN + the id   nobody's, to which its locks are left while they cool down


class Header(NamedTuple):
    """The header's content.

    Attributes:
        execution_id: anew at each publish.
        own: False if the id was made from the task id, as the message came without a header. Such
            an id cannot tell a copy from a task that somebody sends again on purpose.
        attempts: how often its message was sent again because its lock was held, or Redis away.
        since: the sender's clock (s since the epoch) when that first happened; 0 before.
        ancestors: execution ids of the holds that its ancestors have.
        kept: lock names and fences of what the attempt before a retry left to it (see `retry`).
        before: execution ids of the holds that the attempt before a retry leaves to it.
        workflow_locks: those that it belongs to (see `workflow.steps.WorkflowLock`).
        dedup: the name of the call's marker and when it goes (see `marker`).
        order: the line in which the call has a place, and its ticket (see `order`); 0 if another
            call may have overtaken it already, or it took its place when it arrived.
        receiver: the worker, or the queue, whose copy of a broadcast message it is.
        parked_at: the lock for which it, or its burst, was parked, so that Redis publishes it again
            until it has come; "" for none.
        options: what the call says instead of its task's options (`LockOptions.of_call`).
        prefix: of the lock names, as the sender's `relock_prefix` had it; None if it has none.
        refused: why it is to fail: the reason for which `apply_async` would have raised (`refuse`);
            "" for none.
        first: the id that it had before it was given one of its own: made from the task id, or that
            of the broadcast message.
        redelivered: whether the broker has told that of a message of this execution before.
    """

    execution_id: str
    own: bool = True
    attempts: int = 0
    since: float = 0.0
    ancestors: tuple[str, ...] = ()
    kept: tuple[tuple[str, int], ...] = ()
    before: tuple[str, ...] = ()
    workflow_locks: tuple[Mapping[str, Any], ...] = ()
    dedup: tuple[str, str] | None = None
    order: tuple[str, int] | None = None
    first: str = ""
    receiver: str = ""
    parked_at: str = ""
    options: Mapping[str, Any] = {}  # never changed
    prefix: str | None = None
    refused: str = ""
    redelivered: bool = False

    @property
    def first_execution_id(self) -> str:
        """The execution id that the first message of this execution had."""
        return self.first or self.execution_id

    @property
    def marker(self) -> str:
        """The name of its dedup marker, "" for none."""
        return self.dedup[0] if self.dedup else ""

    @property
    def has_leftovers(self) -> bool:
        """Whether Redis can have something for it, at its task's locks, that is in the way of
        others if it does not come (see `leftovers.Leftovers`)."""
        return bool(self.parked_at or self.kept or self.order or self.marker)

    @property
    def has_any_leftovers(self) -> bool:
        """The same, also at a workflow's locks."""
        return self.has_leftovers or bool(self.workflow_locks)

    @property
    def stuck(self) -> tuple[str, ...]:
        """Itself, if it has something that others wait for before it has its locks: its turn in its
        line, or what is kept for it."""
        return (self.execution_id,) if self.order or self.kept else ()

    def content(self) -> dict[str, Any]:
        """What is written into a message: the version of this content, so that one that is not
        known is ignored, and all that is not as it would be without."""
        usual = self._field_defaults
        told = self._asdict().items()
        said = {key: value for key, value in told if key not in usual or value != usual[key]}
        return {"v": VERSION, **said}

    def made_own(self) -> Header:
        """The header with an id of its own, by which copies of the message are recognised."""
        if self.own:
            return self
        return self._replace(execution_id=ids.new_id(), own=True, first=self.execution_id)

    def again(self, message: Any) -> Header:
        """The header for the same execution's next message, after this one."""
        told, since = is_redelivered(message), self.since or time.time()
        return self._replace(attempts=self.attempts + 1, since=since, redelivered=told)


def is_redelivered(message: Any) -> bool:
    """Whether the execution may have begun before, as the broker tells it."""
    return bool((message.delivery_info or {}).get("redelivered"))


def header_of(message: Any) -> Header:
    """The header that a message came with, or one made from the task id if none can be read."""
    found: Header | None = getattr(message, _PARSED, None)
    if found is None:
        raw = getattr(message, HEADER, None) or (message.headers or {}).get(HEADER)
        found = parse(raw) or Header(ids.short(f"{message.id}:{message.retries}"), own=False)
        keep_header(message, found)
    return found


def keep_header(message: Any, header: Header) -> None:
    """Keep this as the header that a message came with."""
    message.headers = message.headers or {}
    setattr(message, _PARSED, header)


def parse(raw: object) -> Header | None:
    """Read our header in a message, where there may be nothing, or something else.

    A field that cannot be read counts as left out, except for those that tell the execution.

    Returns:
        The header; None without one, and if it is of another version or does not tell its
        execution.
    """
    if not isinstance(raw, Mapping) or raw.get("v") != VERSION:
        return None
    said = {}
    for name, read in _READ.items():
        if name in raw:
            try:
                said[name] = read(raw[name])
            except (TypeError, ValueError):
                if name in _OF_EXECUTION:
                    return None
    return Header(**said) if "execution_id" in said else None


def _is(*kinds: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if isinstance(value, kinds):
            return value
        raise TypeError(value)

    return read


def _id(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return ids.short(value)


def _named(value: Any, kind: type) -> tuple[str, Any]:
    name, told = value
    return _is(str)(name), _is(kind)(told)


def _seconds(value: int | float) -> float:
    # JSON has numbers that are no time: NaN, Infinity, and those that no float can be.
    if 0 <= value < _LAST:
        return float(value)
    raise ValueError(value)


def _ids(value: Any) -> tuple[str, ...]:
    return tuple([_id(each) for each in _is(list, tuple)(value)[:_MOST_ANCESTORS] if each])


_READ: dict[str, Callable[[Any], Any]] = {
    "execution_id": _id,
    "attempts": _is(int),
    "since": lambda value: _seconds(_is(int, float)(value)),
    "own": lambda value: value is not False,
    "parked_at": _is(str),
    "first": lambda value: _id(value) if value else "",
    "receiver": _is(str),
    "options": _is(Mapping),
    "prefix": _is(str),
    "refused": _is(str),
    "redelivered": _is(bool),
    "ancestors": _ids,
    "kept": lambda value: tuple(_named(each, int) for each in value),
    "before": _ids,
    "dedup": lambda value: _named(value, str),
    "order": lambda value: _named(value, int),
    "workflow_locks": lambda value: tuple(map(_is(Mapping), _is(list, tuple)(value))),
}
# Those that tell the execution.
_OF_EXECUTION = ("execution_id", "attempts", "since")


def write_header(
    headers: dict[str, Any], properties: dict[str, Any], queues: Iterable[Any]
) -> dict[str, Any]:
    """Write our header into a message that is about to be published, and return the header.

    Args:
        headers: of the message.
        properties: of the message. `OPTIONS`, `PREFIX` and `SAYS` are among them, and the `lock_*`
            options of a call by name; they are taken out.
        queues: those that the message goes to, if its sender knows them.
    """
    # Celery copies custom headers from the message before: that header is replaced, never kept.
    before = attempt_before(headers, headers)
    prefix, options = _of_call(headers, properties, queues, before)
    header = Header(
        ids.new_id(),
        ancestors=_ancestors(before),
        workflow_locks=() if before is None else before.workflow_locks,
        options=options,
        prefix=prefix,
    ).content()
    header.update(properties.pop(SAYS, {}))
    headers[HEADER] = header
    return header


def attempt_before(fields: Mapping[str, Any], headers: Mapping[str, Any] | None) -> Header | None:
    """The header of the attempt of which a message is the retry, or, outside of any task, of the
    message whose headers it was given; None if there is none.

    Args:
        fields: where the message has its id.
        headers: of the message. Celery copies those of the attempt before into them.
    """
    request = running_request()
    if request is not None:
        return header_of(request) if is_retry(fields, request) else None
    # A worker's main process sends it, for an execution whose child has died.
    return parse((headers or {}).get(HEADER))


def _of_call(
    fields: Mapping[str, Any],
    properties: dict[str, Any],
    queues: Iterable[Any],
    before: Header | None,
) -> tuple[str | None, dict[str, Any]]:
    """The prefix and the options of a call instead of its task's. A retry has those of its call."""
    prefix, options = properties.pop(PREFIX, None), take_options(properties)
    options |= properties.pop(OPTIONS, {})
    if options:
        _tell_of_unused(fields.get("task"), options, queues)
    if before is not None:
        prefix, options = before.prefix, {**before.options, **options}
    elif prefix is None:
        # A plain task, or one that is sent by its name: a locked task may come after it.
        prefix = _prefix_of_sender(queues)
    return prefix, options


def _tell_of_unused(task: Any, options: Mapping[str, Any], queues: Iterable[Any]) -> None:
    """Log which options of a call its task will not use."""
    written, known = ", ".join(f"lock_{name}" for name in options), _sender(queues)._tasks.get(task)
    if task in _MAPS:
        text = "calls its task directly: declare them on the task, or send a group"
    elif known is not None and not is_lockable(known):
        text = "is no LockedTask"
    else:
        return  # a worker refuses what is no option
    logger.warning("The options %s of a call of %s are not used: it %s", written, task, text)


def take_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the `lock_*` options out of those of a call. Returns them by their short names, as a
    message has them."""
    said = {}
    for written in [name for name in options if name.startswith("lock_")]:
        value = options.pop(written)
        is_time = isinstance(value, timedelta)
        said[written.removeprefix("lock_")] = value.total_seconds() if is_time else value
    return said


# -- The prefix of lock names --------------------------------------------------------------------
#
# All that is sent or called, wherever and in whatever way, has the first of these that there is:
#
#     1. of a retry, that of its call
#     2. what `relock_prefix` says here and now, unless that is empty
#     3. that of the message that it is sent or called for: `prefix_here`
#     4. none
#
# The third, as a worker's own context need not have a tenant; behind the second, as a task can set
# the tenant for what it sends. That there is none is carried, too: the worker's `relock_prefix`
# would be asked, which may find there what another task has left.


def prefix_here() -> str | None:
    """The prefix in the message that something is sent or called for here; None if it has none.

    That is the message that this call stack runs for. Where Celery's stack is of another thread, it
    is the one whose body this context is of; and in a worker's main process the one that Celery
    ends there, and sends and calls error callbacks for.
    """
    for request in (running_request(), *[each.request for each in reversed(inside.get())]):
        if request is not None and (prefix := header_of(request).prefix) is not None:
            return prefix
    ended = _ended_here.get()
    header = None if ended is None else parse(ended.request_dict.get(HEADER))
    return None if header is None else header.prefix


def prefix_of(own: str | Callable[[], str]) -> str | None:
    """The prefix of the lock names of a call that is made here, if it is no retry; None if nothing
    says one.

    Args:
        own: what the app's `relock_prefix` says, or a callable that says it now.

    Raises:
        LockConfigError: the callable gave no text.
    """
    said = own() if callable(own) else own
    if not said and (carried := prefix_here()) is not None:
        return carried
    return said if said or callable(own) else None


# For each app, because to read a setting takes long.
_prefixes: WeakKeyDictionary[Any, str | Callable[[], str]] = WeakKeyDictionary()


def forget_prefixes() -> None:
    """The settings of some app may have changed: `relock_prefix` is read anew when next needed."""
    _prefixes.clear()


def _sender(queues: Iterable[Any]) -> Any:
    """The app that publishes, found by its `Queue` objects, as Celery does not tell it.

    For an exchange without a queue it is the current app.
    """
    for queue in queues:
        for app in list(_get_active_apps()):
            if "amqp" in vars(app) and app.amqp.queues.get(queue.name) is queue:
                return app
    return current_app._get_current_object()


def _prefix_of_sender(queues: Iterable[Any]) -> str | None:
    try:
        app = _sender(queues)
        known = _prefixes.get(app)
        if known is None:
            known = _prefixes[app] = name_prefix(app)
        return prefix_of(known)
    except LockConfigError as error:
        # Celery's signal would swallow the error, and the message would have no header at all.
        carried = prefix_here()
        logger.error("a message is sent with the prefix %r: %s", carried or "", error)
        return carried


# -- Ancestors -----------------------------------------------------------------------------------


def ancestors_here() -> tuple[str, ...]:
    """The ancestors of the message that this call stack runs for, or, in a thread, for which the
    body runs whose context it has; empty outside of tasks."""
    for request in (running_request(), *[each.request for each in inside.get()]):
        if request is not None:
            return header_of(request).ancestors
    return ()


def _ancestors(before: Header | None) -> tuple[str, ...]:
    """The ancestors for a message that is published here, which may be a retry."""
    if before is not None:
        # Without its own holds: the retry would re-enter while the body before it still ends.
        return before.ancestors
    known = dict.fromkeys((*reentrancy.executions(), *ancestors_here()))
    return tuple(islice(known, _MOST_ANCESTORS))


# -- The owner -----------------------------------------------------------------------------------
#
# `task.request` does not tell it (seen on Celery 5.7): a direct call `other(...)` has no id and no
# root, `apply()` under a direct call gets a root of its own, and a task that calls itself looks
# like the one that the worker called. The first request with an id, from the bottom of the task
# stack, is the message that the worker, or the outermost `apply()`, executes.

OwnerOption: TypeAlias = str | Callable[[Any], object]


def workflow() -> str | None:
    """The short id of the workflow that this call stack belongs to; None outside of any task."""
    request = running_request()
    return None if request is None else _workflow_of(request)


def _workflow_of(request: Any) -> str:
    # Who sends by hand may leave it out: then the workflow is the task itself.
    return ids.short(request.root_id or request.id)


def owner_of(option: OwnerOption, request: Any | None, where: str = "") -> str:
    """The owner under a task's `lock_owner`.

    Args:
        option: the option's value.
        request: of the message that the locked task itself runs for, None for a direct call.
        where: the task's name, for messages.

    Raises:
        LockConfigError: the callable in the option failed, or gave no owner.
    """
    running = request if request is not None and not request.is_eager else running_request()
    if running is None:
        # A direct call outside of any task belongs to the holder of a lock around it, or to itself.
        outer = reentrancy.innermost()
        return ids.new_id() if outer is None else outer.claim.owner
    if option == "root":
        return _workflow_of(running)
    asked = running if request is None else request
    return ids.short(asked.id if option == "task" else _asked(option, asked, where))


def _asked(option: Any, request: Any, where: str) -> str:
    what = f"task {where}: the callable in lock_owner"
    found = called(what, option, request)
    if not isinstance(found, str) or not found:
        raise LockConfigError(
            f"{what} must return a text, the same for all who can re-enter; it returned "
            f"{found!r:.100} for request {request.id}"
        )
    return found


# -- Who sends ----------------------------------------------------------------------------------
#
# What a program calls can be refused, and be a duplicate. What Celery sends for a canvas, a link, a
# retry or a replaced task is always sent: somebody waits for its very id.

# The options of a call whose result somebody else waits for: Celery makes it, or goes on from it.
_AWAITED = (
    *("task_id", "chain", "chord", "group_id", "link", "link_error"),
    *("retries", "replaced_task_nesting", "parent_id", "root_id"),
)


def is_awaited(options: Mapping[str, Any]) -> bool:
    """Whether somebody else waits for the result of a call with these options."""
    return any(options.get(name) for name in _AWAITED)


def may_be_celerys(fields: Mapping[str, Any]) -> bool:
    """Whether Celery may send a message by itself, or a call with these options.

    Somebody may wait for whatever comes out of a task: the next step of a chain, a link. Only what
    is sent while the body of a LockedTask runs is surely sent by that body.
    """
    request = running_request()
    parent = fields.get("parent_id") or (None if request is None else request.id)
    return parent is not None and not body_runs(parent)


def has_to_be_sent(options: Mapping[str, Any]) -> bool:
    """Whether a call with these options is sent whatever is wrong with it.

    Celery, which has sent it, cannot be told: it would lose the outcome of the task behind which
    the call comes, or reject the message whose retry it is. An error callback can end a worker.
    """
    return bool(options.get("retries")) or (is_awaited(options) and may_be_celerys(options))


def refuse(options: dict[str, Any], error: LockConfigError) -> None:
    """Raise the error for which a call with these options is not to be sent. One that has to be
    sent fails with it in the worker: its message says so."""
    if not has_to_be_sent(options):
        raise error
    options[SAYS] = {**options.get(SAYS, {}), "refused": error.reason}


# -- Times ---------------------------------------------------------------------------------------

#: How long a message may be in a broker's queue after it is due, in seconds, before its call no
#: longer counts: this is what a lost message costs.
QUEUED = 86_400.0


def moment(when: Any) -> float | None:
    """An ETA or expiry, in any form that a message or a call has it. Celery takes one without a
    zone for UTC, whatever the app's `timezone`. Returns seconds since the epoch; None if it is not
    a time."""
    try:
        found = maybe_iso8601(when)
    except (TypeError, ValueError):
        return None  # Celery says so better
    if not isinstance(found, datetime):
        return None
    return float(maybe_make_aware(found).timestamp())


def keep_for(gap: float, eta: Any, expires: Any) -> float:
    """For how many seconds something is kept for a message: `gap` seconds after it is due, but no
    longer than it lives. RabbitMQ drops one that has expired, and no worker hears of it."""
    keep, ends = (seconds_to(eta) or 0.0) + gap, seconds_to(expires)
    # A second more, as a worker's clock may be behind.
    return keep if ends is None else min(keep, ends + 1.0)


def seconds_to(when: Any) -> float | None:
    """Seconds from now to an ETA or expiry, which may be given as such; 0 for what is over, None if
    it is not a time."""
    if isinstance(when, int | float):
        return max(0.0, float(when))
    until = moment(when)
    return None if until is None else max(0.0, until - time.time())
