"""`lock_debounce`: the calls of a burst are sent as one message, when no more of them come.

    send       from `LockedTask.apply_async`: which calls are merged, and what the caller gets
    _message   a call as Celery would send it, kept instead of sent
    _reduced   the arguments of several calls in one

A burst is a message that is parked for a lock of its own, which nobody acquires: its one hold, the
*pause*, is made longer by each call, and when it ends the message's turn has come, like that of any
parked message (`lua/debounce.lua`). From then on it is a message like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from celery.utils import uuid
from kombu import serialization
from kombu.common import maybe_declare
from kombu.compression import get_encoder

from .declaration import engine_of, not_executed
from .dedup import client as dedup
from .dedup import marker
from .dedup.client import Sending
from .engine import ids
from .engine.events import describe_full, label_of, logger
from .engine.protocol import (
    DEBOUNCE,
    REMEMBER_ATTEMPT,
    Burst,
    Debounce,
    Full,
    Parked,
    ParkRequest,
    Release,
)
from .errors import LockConfigError, LockConflict, LockUnavailable
from .naming.callables import called
from .naming.names import Misfit, bind, dumped, signature_of
from .settings import enabled
from .worker.message import HEADER, is_awaited, seconds_to
from .worker.parking import LARGEST, RawMessage, home, message_in, parked_text

Arguments = tuple[Sequence[Any], Mapping[str, Any]]


def send(sending: Sending) -> Any:
    """Merge a call into its burst, or begin one; see `LockedTask.apply_async`. A call for whose
    result somebody else waits is sent at once."""
    task, declared, _, args, kwargs, options = sending
    pause = declared.options.debounce
    if is_awaited(options) or not enabled(task.app):
        return dedup.send(sending)
    if options.get("countdown") or options.get("eta"):
        raise LockConfigError(
            f"a call of {task.name}: lock_debounce={pause:g} says when it is sent, so it can have "
            "no countdown or eta of its own. With lock_debounce=False in apply_async it is sent by "
            "itself."
        )
    expires = seconds_to(options.get("expires", task.expires))
    if expires is not None and expires <= (pause or 0.0):
        raise LockConfigError(
            f"a call of {task.name} expires in {expires:.3g} s, and lock_debounce={pause:g} sends "
            "it later, so it would never run. With lock_debounce=False in apply_async it is sent "
            "at once."
        )
    names = declared.names_of_call(task, args, kwargs)
    try:
        return _merge(sending._replace(args=args or (), kwargs=kwargs or {}), names)
    except LockUnavailable as error:
        if declared.options.on_unavailable == "raise":
            raise
        logger.error("%s is sent without lock_debounce: %s", task.name, error)
        return dedup.send(sending)


def _merge(sending: Sending, names: tuple[str, ...]) -> Any:
    task, own = sending.task, sending.declared.options
    engine, app = engine_of(sending.declared.app), task.app
    name, reduce = DEBOUNCE + "\t".join((task.name, *names)), own.debounce_reduce
    burst: Burst | Any = engine.backend.burst(name, reduce is not None)
    while True:
        task_id = uuid() if burst is None else burst.task_id
        merged = sending._replace(options={**sending.options, "task_id": task_id})
        if reduce is not None and burst is not None:
            args, kwargs = _reduced(sending, names, burst)
            merged = merged._replace(args=args, kwargs=kwargs)
        text, result = _message(merged, names[0])
        call = Debounce(
            ids.new_id(),
            burst,
            reduce is not None,
            own.debounce or 0.0,
            own.longest_burst,
            task_id,
            label_of(task.name, task_id),
        )
        # Not `lock_max_parked`: of a name one burst waits, and those before it are on their way.
        most, size = engine.most_parked
        to = home(app), ids.short(task_id)
        request = ParkRequest(text, *to, most_in_all=most, most_bytes=size)
        try:
            answer = engine.backend.debounce(name, call, request)
        except LockUnavailable:
            if burst is None:
                # If only the answer is lost, a burst has begun all the same. It stays once another
                # call was merged into it: the attempt of a burst's message is its last call.
                both = call.call_id, call.call_id
                begun = Release([name], *both, "attempt", REMEMBER_ATTEMPT)
                engine.later.add(partial(engine.backend.release, begun))
            raise
        if isinstance(answer, Parked):
            logger.debug("%s[%s] waits until no more such calls come", task.name, task_id)
            if sending.options.get("add_to_parent", True) and (parent := app.current_worker_task):
                parent.add_trail(result)
            return result
        if isinstance(answer, Full):
            text = f"a call of {task.name} cannot be kept for lock_debounce"
            raise LockConflict(f"{text}: {describe_full(answer)}")
        burst = answer  # another call was merged first, or the burst was sent


# --- the message ----------------------------------------------------------------------------------


class _Keeper:
    """A producer that keeps the message it is to publish: all else about it is as for any call."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self.raw: RawMessage | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **told: Any) -> Any:
        if self.raw is not None:
            return self._producer.publish(body, **told)  # the event `task-sent`
        retry, policy = bool(told.pop("retry", False)), told.pop("retry_policy", None) or {}
        declare = told.pop("declare", None) or ()
        for entity in declare:
            # Here, as whoever publishes it may not know the queue. Bound first, as kombu 5.3 does
            # not do that; and without a channel, as that of a try anew is another one.
            maybe_declare(entity.bind(self._producer.channel), None, retry, **policy)
        exchange, routing_key = told.pop("exchange", None), told.pop("routing_key", None)
        name = getattr(exchange, "name", exchange) or ""
        known = [exchange, *(getattr(entity, "exchange", entity) for entity in declare)]
        kinds = [each.type for each in known if name and getattr(each, "name", None) == name]
        headers, compression = told.pop("headers"), told.pop("compression", None)
        content_type, encoding, written = serialization.dumps(
            body, serializer=told.pop("serializer", None)
        )
        if compression:
            _, headers["compression"] = get_encoder(compression)
        if told.get("expiration") is not None:
            told["expiration"] = str(int(float(told["expiration"]) * 1000))
        properties = {name: value for name, value in told.items() if value is not None}
        self.raw = RawMessage(
            written,
            content_type,
            encoding,
            headers,
            properties,
            name,
            routing_key or "",
            exchange_type=next(iter(kinds), ""),
        )
        return None


def _message(sending: Sending, lock: str) -> tuple[str, Any]:
    """The message of a call as text (see `parked_text`), and its AsyncResult. `lock`: its lock's
    name."""
    task, _, publish, args, kwargs, options = sending
    given, connection = options.get("producer"), options.get("connection")
    if connection is not None:  # as Celery does, which would put its producer in the place of ours
        given = task.app.amqp.Producer(connection, auto_declare=False)
    with task.app.producer_or_acquire(given) as producer:
        keeper = _Keeper(producer)
        # A child of its caller is what is kept: `_merge` adds it.
        ours = {"producer": keeper, "connection": None, "add_to_parent": False}
        result = publish(args, kwargs, **{**options, **ours})
    raw = keeper.raw
    if raw is None:
        raise LockConfigError(
            f"a call of {task.name} cannot be kept for lock_debounce: it was not published by the "
            "`producer` that it was given. If an apply_async or a send_task of your own publishes "
            "it, it has been sent. With lock_debounce=False in apply_async it is sent by itself."
        )
    header = {**raw.headers[HEADER], "parked_at": lock}
    if header.get("dedup") == ["", marker.OWN]:
        del header["dedup"]  # it is a call of a program, whichever task that runs in
    text = parked_text(task.app, raw, header)
    if text is None:
        raise LockConfigError(
            f"a call of {task.name} cannot be kept for lock_debounce: its message is larger than "
            f"{LARGEST} bytes, or has a header that is no JSON. With lock_debounce=False in "
            "apply_async it is sent by itself."
        )
    return text, result


# --- the arguments of several calls ---------------------------------------------------------------


def _reduced(sending: Sending, names: tuple[str, ...], burst: Burst) -> Arguments:
    """What `lock_debounce_reduce` makes of the arguments of the burst and of this call, both as a
    worker would receive them.

    Raises:
        LockConfigError: it failed, or returned what the task cannot be called with, or what another
            lock belongs to.
    """
    task, declared = sending.task, sending.declared
    reduce = declared.options.debounce_reduce
    assert reduce is not None, "see `_merge`"
    body = message_in(task.app, burst.message).decode()
    before = (body["args"], body["kwargs"]) if isinstance(body, Mapping) else body[:2]
    try:
        earlier, later = bind(task, *before), bind(task, *_as_received(sending))
    except Misfit as error:
        raise LockConfigError(
            f"a call that waits for lock_debounce: {error} Was the task changed since it was "
            f"called? It is sent within {declared.options.longest_burst:g} s of the first call."
        ) from error
    where = f"task {task.name}: the callable in lock_debounce_reduce"
    with not_executed(task):
        found = called(where, lambda: dict(reduce(earlier, later)))
    made = inspect.BoundArguments(signature_of(task), found)
    is_known = found.keys() <= signature_of(task).parameters.keys()
    try:
        arguments = bind(task, made.args, made.kwargs) if is_known else None
    except (TypeError, KeyError):
        arguments = None
    if arguments is None:
        raise LockConfigError(
            f"{where} has to return the arguments of {task.name}{signature_of(task)} by name; it "
            f"returned {found!r:.200}"
        )
    with not_executed(task):
        same = declared.names(arguments) == names
    if not same:
        locks = ", ".join(map(repr, names))
        raise LockConfigError(f"{where} returned the arguments of another lock than {locks}")
    return _as_given(made, len(sending.args))


def _as_given(made: inspect.BoundArguments, count: int) -> Arguments:
    """As many of these arguments by position as the call had, the others by name: routes and
    handlers of signals read a call as it was written."""
    args, kwargs = made.args, made.kwargs
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = [each for each in made.signature.parameters.values() if each.kind <= either]
    if len(args) > len(first):  # what `*args` took needs all before it by position
        return args, kwargs
    named = [each.name for each in first[count : len(args)] if each.kind is either]
    by_name = {name: made.arguments[name] for name in named}
    return args[: len(args) - len(named)], {**by_name, **kwargs}


def _as_received(sending: Sending) -> Arguments:
    task, given = sending.task, sending.options.get("serializer")
    serializer = given or task.serializer or task.app.conf.task_serializer
    sent = dumped(task, sending.args, sending.kwargs, serializer)
    kind, encoding, written = serialization.dumps(sent, serializer=serializer)
    args, kwargs = serialization.loads(written, kind, encoding, accept={kind})
    return args, kwargs
