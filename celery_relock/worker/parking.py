"""A message that has to wait for its lock: carried as it was received, written down, and published
again to the broker of its own app.

    task_received (main process)        carry: the raw message travels along in the task's request
    a child, its lock is held           parked_text(app, carried(request), header), stored in Redis
    the release that grants its lock    Outbox.send: publish(app, text, queue=…)

What is published is what was received, to the byte, but for our own header. No task, signature,
`apply_async` or receiver of `before_task_publish` has a part in it, nor a context variable of the
process that happens to publish it: that one runs for somebody else.
"""

from __future__ import annotations

import re
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import Context
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

from celery import Celery
from celery.local import Proxy
from celery.signals import task_received
from kombu import Exchange, serialization
from kombu.common import Broadcast
from kombu.compression import compress
from kombu.message import Message as Received
from kombu.utils import json

from ..engine import events, ids
from ..engine.events import logger
from ..engine.parking import Sender
from ..engine.protocol import DEBOUNCE, Message, ParkRequest
from ..errors import LockConfigError, LockUnavailable, RelockError
from . import delayed
from . import events as worker_events
from .broker import answers, is_amqp, producer_of
from .message import HEADER, Header, header_of, is_lockable, keep_header, parse

# A message of more bytes is not parked: it stays with the broker, which is made for it.
LARGEST = 1_000_000
#: On a message that goes to a queue by its name: the exchange and the routing key that it had, and
#: the queue.
ORIGIN = "relock_origin"
#: What the name of a resume queue has behind the name of the queue that it stands beside.
SUFFIX = ".resumed"

#: The property of a request that is its message. Celery sends these nowhere; a key of the request
#: itself would become a header of each retry.
CARRIED = "relock_message"
# Properties of a received message that the broker's client writes anew, or takes as arguments.
_WRITTEN_ANEW = ("delivery_info", "delivery_tag", "body_encoding", "application_headers", CARRIED)
# Of SQS: they are for one message. The delay is over, and by the id SQS would take what comes back
# for a copy, and swallow it.
_FOR_ONE = ("DelaySeconds", "delay_seconds", "MessageDeduplicationId")
# Seconds in which the broker has to take a message. One that it does not take keeps a thread and a
# connection. So the more of them hang, the later the next one is tried, up to so many seconds: a
# RabbitMQ that is short of memory blocks whoever publishes.
_PUBLISHING, _LONGEST_PAUSE = 10.0, 600.0
_ARGUMENTS = ("content_type", "content_encoding", "priority", "delivery_mode", "expiration")


class RawMessage(NamedTuple):
    """A message as it was received.

    Attributes:
        body: as the sender's serializer wrote it; decompressed.
        content_type, content_encoding: of the body.
        headers: all of them.
        properties: the others; of RabbitMQ with content type, encoding and headers once more.
        exchange, routing_key: where the sender sent it.
        queue: where it was received, "" if that cannot be told.
        receiver: whose copy it is of what a fanout exchange brings to several; "" for no copy.
        exchange_type: as the sender declared it, of a message that was not received; else "".
    """

    body: bytes | str
    content_type: str
    content_encoding: str
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    exchange: str
    routing_key: str
    queue: str = ""
    receiver: str = ""
    exchange_type: str = ""


class Carried(str):
    """A message in the properties of a request: a text without the arguments, for who writes these
    into a log, or as JSON.
    """

    __slots__ = ("message",)
    message: RawMessage

    def __new__(cls, message: RawMessage) -> Carried:
        self = super().__new__(cls, f"<message of {len(message.body)} bytes>")
        self.message = message
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Carried, (self.message,)


def carry() -> None:
    """Let requests carry their messages, from now on and in this process: the main process of a
    worker, before it has its pool."""
    task_received.connect(_received, weak=False, dispatch_uid="celery_relock.carry")


def _received(sender: Any = None, request: Any = None, **_: Any) -> None:
    if "task" in request.message.headers and _may_be_parked(request):  # else it is of protocol 1
        _carry(sender, request)


def _may_be_parked(request: Any) -> bool:
    if is_lockable(request.task) and request.task._relock_declares():
        return True
    header = parse(request.request_dict.get(HEADER))
    return header is not None and bool(header.workflow_locks)


def _carry(consumer: Any, request: Any) -> None:
    message, told = request.message, request.request_dict
    come_back(message)
    told.pop(ORIGIN, None)
    info, properties = message.delivery_info, told["properties"]
    exchange, routing_key = info.get("exchange") or "", info.get("routing_key") or ""
    told["delivery_info"].update(exchange=exchange, routing_key=routing_key)
    if exchange == delayed.IS_DUE:
        exchange, routing_key = _sent_to(consumer, exchange, routing_key)
    queue = info.get("queue") or _queue_of(consumer, info, exchange, routing_key)
    raw = RawMessage(
        message.body,
        message.content_type,
        message.content_encoding,
        message.headers,
        properties,
        exchange,
        routing_key,
        queue,
        _receiver(consumer, queue, exchange),
    )
    # A copy: the dict is kombu's.
    told["properties"] = {**properties, CARRIED: Carried(raw)}


def come_back(message: Any) -> None:
    """A message that has come by way of a resume queue, or by the name of its queue, is to say that
    it came where it was sent to first: else a retry of it would be sent there."""
    origin = message.headers.pop(ORIGIN, None)
    if isinstance(origin, list | tuple) and len(origin) == 3:
        exchange, routing_key, queue = origin
        message.delivery_info.update(exchange=exchange, routing_key=routing_key, queue=queue)


def _sent_to(consumer: Any, exchange: str, routing_key: str) -> tuple[str, str]:
    """Exchange and routing key of a message before it waited in the broker (see `delayed`)."""
    key = delayed.key_before(routing_key)
    found = {
        way.exchange.name
        for queue in _queues(consumer)
        for way in (queue, *(queue.bindings or ()))
        if way.exchange is not None and _exchange_of(queue, way.exchange.name, key) is not None
    }
    return (found.pop(), key) if len(found) == 1 else (exchange, routing_key)


def _queue_of(consumer: Any, info: Mapping[str, Any], exchange: str, routing_key: str) -> str:
    """The queue that a worker received a message from, "" if it may have come from several: Redis
    does not tell."""
    tags = getattr(consumer.task_consumer, "_active_tags", {})
    of_tag = [name for name, tag in tags.items() if tag == info.get("consumer_tag")]
    found = of_tag or [
        queue.name for queue in _queues(consumer) if _delivers(queue, exchange, routing_key)
    ]
    return str(found[0]) if len(found) == 1 else ""


def _receiver(consumer: Any, queue: str, exchange: str) -> str:
    """Whose copy of a message it is; see `RawMessage`.

    RabbitMQ brings a copy to each queue, for all that consume it; kombu's virtual transports bring
    one to each worker. There a queue at such an exchange is what `Broadcast` is on RabbitMQ.
    """
    ways = [each for each in _queues(consumer) if exchange and _is_fanout(each, exchange)]
    if not ways:
        return ""
    is_shared = any(each.name == queue and not isinstance(each, Broadcast) for each in ways)
    return queue if is_shared and is_amqp(consumer.connection) else str(consumer.hostname)


def _queues(consumer: Any) -> list[Any]:
    return list(getattr(consumer.task_consumer, "queues", ()))


def _is_fanout(queue: Any, exchange: str) -> bool:
    by = _exchange_of(queue, exchange, "")
    return by is not None and by.type == "fanout"


def _delivers(queue: Any, exchange: str, routing_key: str) -> bool:
    if not exchange:
        return bool(queue.name == routing_key)
    return _exchange_of(queue, exchange, routing_key) is not None


def _exchange_of(queue: Any, exchange: str, routing_key: str) -> Any:
    """The exchange of this name, if it brings such messages to the queue; else None."""
    for way in (queue, *(queue.bindings or ())):
        if way.exchange is None or way.exchange.name != exchange:
            continue
        key, kind = way.routing_key or "", way.exchange.type
        if kind == "direct" and key != routing_key:
            continue
        if kind == "topic" and not _fits(key.split("."), routing_key.split(".")):
            continue
        return way.exchange
    return None


def _fits(pattern: list[str], words: list[str]) -> bool:
    """Whether a topic's pattern matches: `*` is one word, `#` any number of them."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(_fits(pattern[1:], words[start:]) for start in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and _fits(pattern[1:], words[1:])


def carried(request: Any) -> RawMessage | None:
    """The message that a task's request (`celery.app.task.Context`) was made from; None if it was
    not carried: a call without a message, or a `Task.Strategy` that sends no `task_received`."""
    found = (request.properties or {}).get(CARRIED)
    return found.message if isinstance(found, Carried) else None


def parked_text(
    app: Celery, raw: RawMessage, header: Mapping[str, Any], *, largest: int | None = LARGEST
) -> str | None:
    """A message as JSON text, for `ParkRequest.message` and `publish`.

    Args:
        app: whose message it is.
        header: our header for the message when it comes again.
        largest: bytes that the text may have; None for one that is published at once.

    Returns:
        None, and a warning is logged, if it is too large for Redis, or has a header or property
        that no broker would have sent.
    """
    # RabbitMQ's counts of deliveries (the last since 4.3) are not for the next message.
    not_there = ORIGIN, "x-delivery-count", "x-acquired-count"
    headers = {name: value for name, value in raw.headers.items() if name not in not_there}
    if delayed.DEATHS in headers:
        headers = delayed.without_waiting(headers)
    headers[HEADER] = dict(header)
    not_again = _WRITTEN_ANEW + _FOR_ONE
    properties = {k: v for k, v in raw.properties.items() if k not in not_again}
    body, binary = _as_text(raw.body, raw.content_encoding)
    told = {"body": body, "binary": binary, "headers": headers, "properties": properties}
    content = {"home": home(app, raw.queue), **raw._asdict(), **told}
    try:
        text: str = json.dumps(content, ensure_ascii=False)
        fits = largest is None or len(text.encode()) <= largest
        why = "" if fits else f"is larger than {largest} bytes"
    except (TypeError, ValueError) as error:
        text, why = "", f"cannot be written ({error})"
    if why:
        name = headers.get("task", "a task")
        logger.warning("A message of %s %s, so it is not parked", name, why)
    return None if why else text


def _as_text(body: bytes | str, encoding: str) -> tuple[str, bool]:
    """The body as text, and whether the text is base64, which a body that is not UTF-8 needs."""
    raw = body if isinstance(body, bytes) else body.encode(encoding or "utf-8")
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return b64encode(raw).decode(), True


def _from_text(text: str, binary: bool) -> bytes:
    return b64decode(text) if binary else text.encode()


def message_in(app: Celery, text: str) -> Any:
    """A written message, as a `kombu.Message` that can be read and not acknowledged."""
    found = json.loads(text)
    body = _from_text(found["body"], found["binary"])
    return Received(
        body=body,
        content_type=found["content_type"],
        content_encoding=found["content_encoding"],
        headers={**found["headers"], "compression": None},  # kombu decompressed it
        properties=found["properties"],
        delivery_info={"exchange": found["exchange"], "routing_key": found["routing_key"]},
        accept=serialization.prepare_accept_content(app.conf.accept_content),
    )


def publish(
    app: Celery, text: str, *, queue: str | None = None, delay: float | None = None
) -> None:
    """Publish a message that `parked_text` wrote, to where it came from.

    Args:
        app: whose message it is; the broker is its.
        queue: to this queue instead, with where it came from in a header (see `come_back`).
        delay: seconds after which a worker is to run it, None for at once.

    Raises whatever the broker's client raises.
    """
    # The process publishes in the middle of somebody else's task: what that one has set (a trace,
    # a tenant) is not for this message. A thread of its own, as New Relic's hook of kombu goes by
    # the thread and not by the context.
    found, failed = json.loads(text), []

    def work() -> None:
        try:
            Context().run(_publish, app, found, queue, delay)
        except Exception as error:  # noqa: BLE001  # raised below, where it belongs
            failed.append(error)

    hung, until = _hung.get(app, ([], 0.0))
    hung = [each for each in hung if each.is_alive()]
    if hung and time.monotonic() < until:
        raise TimeoutError(f"the broker has not answered for {len(hung)} messages before")
    thread = threading.Thread(target=work, name="relock-publish", daemon=True)
    thread.start()
    # A broker that does not answer must not hold up a body's result. What was not published by
    # then is published later, perhaps once more, and known as a copy.
    thread.join(_PUBLISHING)
    if thread.is_alive():
        hung.append(thread)
        # The first may only have had a connection that is gone.
        pause = _PUBLISHING * (2.0 ** min(len(hung), 16) - 2)
        _hung[app] = hung, time.monotonic() + min(pause, _LONGEST_PAUSE)
        raise TimeoutError(f"the broker has not answered for {_PUBLISHING:g} s")
    if hung:
        _hung[app] = hung, 0.0
    if failed:
        raise failed[0]


# By app: what still waits for its broker, and until when no more is sent there.
_hung: WeakKeyDictionary[Celery, tuple[list[threading.Thread], float]] = WeakKeyDictionary()


def _publish(app: Celery, found: dict[str, Any], queue: str | None, delay: float | None) -> None:
    headers, properties = found["headers"], found["properties"]
    body = _from_text(found["body"], found["binary"])
    exchange, routing_key = found["exchange"], found["routing_key"]
    origin = [exchange, routing_key, found["queue"]]
    declare: list[Any] = []
    if delay is not None:
        headers["eta"] = (datetime.now(timezone.utc) + timedelta(seconds=delay)).isoformat()
    if headers.get("compression"):
        body, _ = compress(body, headers["compression"])  # kombu decompressed it
    expiration = properties.get("expiration")
    with producer_of(app) as producer:
        if queue is None:
            is_copy = bool(headers.get(HEADER, {}).get("receiver"))
            queue, declare = _where(app, producer.connection, *origin, is_copy=is_copy)
            kind = "" if declare or is_amqp(producer.connection) else found.get("exchange_type")
            if kind:  # its queue is unknown here, see `_queues_at`
                declare = [Exchange(exchange, kind)]
        if queue is not None:
            headers[ORIGIN] = origin
            exchange, routing_key = "", queue
        # RabbitMQ refuses a message in the name of another user than who sends it.
        if properties.get("user_id") != producer.connection.userid:
            properties.pop("user_id", None)
        waits = None
        if delay is not None and not exchange:  # by the name of its queue
            waits = delayed.waits_in_broker(app, producer, routing_key, delay)
        if waits is not None:
            headers.setdefault(ORIGIN, origin)
            exchange, routing_key = waits
        producer.publish(
            body,
            exchange=exchange,
            routing_key=routing_key,
            declare=declare,
            content_type=found["content_type"],
            content_encoding=found["content_encoding"],
            headers=headers,
            priority=properties.get("priority"),  # None too: the default is 0
            delivery_mode=properties.get("delivery_mode"),
            # Milliseconds as text; the argument is in seconds, and cut off.
            expiration=None if expiration is None else (int(expiration) + 0.5) / 1000,
            retry=app.conf.task_publish_retry,
            retry_policy=dict(app.conf.task_publish_retry_policy),
            **{name: value for name, value in properties.items() if name not in _ARGUMENTS},
        )


def _where(
    app: Celery, connection: Any, exchange: str, routing_key: str, name: str, *, is_copy: bool
) -> tuple[str | None, list[Any]]:
    """Where a message goes that comes back, and what to declare first, as Celery does to send.

    By its exchange it would come to every queue there, also to those of other apps.

    Args:
        is_copy: whether a broadcast brings it to others, too.

    Returns:
        The queue that it was received from; None for its exchange.
    """
    queue = app.amqp.queues.get(name) if exchange else None
    # Of a queue that a worker was told to consume its children know nothing. Nor do they know then
    # of which type its exchange is, which kombu's virtual transports have to.
    if queue is None and exchange and name and not is_copy and not is_amqp(connection):
        return name, []
    if queue is None or isinstance(queue, Broadcast):
        return None, _queues_at(app, exchange, routing_key)
    by = _exchange_of(queue, exchange, routing_key)
    # Kombu's virtual transports keep no messages of a queue at such an exchange.
    if not is_amqp(connection) and (by is None or by.type == "fanout"):
        return None, _queues_at(app, exchange, routing_key)
    return name, [queue]


def _queues_at(app: Celery, exchange: str, routing_key: str) -> list[Any]:
    """What to declare for a message that goes to its exchange.

    Kombu's virtual transports (Redis, SQS …) take an exchange for a direct one until this process
    has declared it: by a topic exchange the message would reach no queue, and be lost.
    """
    for queue in app.amqp.queues.values():
        if not _delivers(queue, exchange, routing_key):
            continue
        by = _exchange_of(queue, exchange, routing_key) if exchange else None
        if by is not None and by.type != "direct":
            return [by]
        return [] if isinstance(queue, Broadcast) else [queue]
    return []


# Who asks is no part of the place: a key of SQS is rotated. And from kombu 5.7 on, an address
# without a password shows a masked one, but what the kombu before has parked is to be resumed.
_LOGIN = re.compile("//[^/@]*@")
# Options of kombu's transports by which deployments share a broker, and have queues of their own.
_PREFIXES = ("global_keyprefix", "queue_name_prefix", "region", "master_name")


class _Homes(NamedTuple):
    """The homes of an app: of its broker's addresses, and of the queues that have their own."""

    of_broker: tuple[str, ...]
    of_queues: dict[str, str]


_homes: WeakKeyDictionary[Any, _Homes] = WeakKeyDictionary()


def home(app: Celery, queue: str = "") -> str:
    """An id of the app and the broker that a message belongs to, without address and password.

    The app's name is in it, as another app on the same broker may have other queues, as may one
    with another prefix of all queues. A predefined queue of SQS has a home of its own: a process
    that was not told its URL cannot publish to it.
    """
    found = _homes_of(app)
    return found.of_queues.get(queue) or found.of_broker[0]


def homes_of_broker(app: Celery) -> tuple[str, ...]:
    """The homes of messages without one of their own: one for each address of the broker, that of
    `home` first. Another process may have the addresses in another order."""
    return _homes_of(app).of_broker


def homes(app: Celery) -> set[str]:
    """The homes of all messages that this process can publish."""
    found = _homes_of(app)
    return {*found.of_broker, *found.of_queues.values()}


def _homes_of(app: Celery) -> _Homes:
    app = app._get_current_object() if isinstance(app, Proxy) else app
    if app not in _homes:
        connection = app.connection_for_write()  # none of these connects
        every = connection, *map(app.connection_for_write, connection.alt[1:])
        places = [_LOGIN.sub("//", each.as_uri(), count=1) for each in every]
        options = connection.transport_options or {}
        prefixes = [*filter(None, map(options.get, _PREFIXES))]
        predefined = options.get("predefined_queues") or {}

        def made(*of: str) -> str:
            return ids.digest(repr((app.main, *of)).encode())

        _homes[app] = _Homes(
            tuple(made(place, *prefixes) for place in places),
            {name: made(told["url"]) for name, told in predefined.items()},
        )
    return _homes[app]


def send_again(task: Any, message: Any, pause: float) -> bool:
    """Send a message again, to come back after a pause in seconds. False if that failed, which is
    logged."""
    with events.only_logged("%s was not sent again, it stays in its slot", task.name):
        was, again = _carried(task, message), header_of(message).again(message).content()
        text = was and parked_text(task.app, was, again, largest=None)
        if text is not None:
            publish(task.app, text, delay=pause)
            return True
    # It waits in its slot: `lock_max_wait` counts from now on, as it would in the next message.
    header = header_of(message)
    keep_header(message, header._replace(since=header.since or time.time()))
    return False


def park_request(task: Any, message: Any, header: Header, **bounds: Any) -> ParkRequest | None:
    """A message as it is parked, with its next header.

    Args:
        header: for the message when it is resumed.
        **bounds: as for `ParkRequest`.

    Returns:
        None if the message has to stay with the broker, which is logged.
    """
    was = _carried(task, message)
    text = was and parked_text(task.app, was, header.content())
    if was is None or text is None:
        return None
    is_copy, to = header.receiver == message.hostname, home(task.app, was.queue)
    return ParkRequest(text, to, ids.short(message.id), is_copy=is_copy, **bounds)


def _carried(task: Any, message: Any) -> RawMessage | None:
    was = carried(message)
    if was is None:
        logger.warning(
            "a message of %s is one of task_protocol=1, or came without the signal task_received, "
            "so it is not parked: it stays in its slot",
            task.name,
        )
    return was


class Outbox(Sender):
    """Sends what was parked in one Redis, each message to the broker of its own app.

    There is one for each engine. Apps share engines, and may have brokers of their own.

    Args:
        consumed: whether a live worker consumes a resume queue, by its `channel`.
    """

    def __init__(self, consumed: Callable[[str], bool]) -> None:
        self._consumed = consumed
        self._apps: list[ref[Celery]] = []
        # Whose broker did not take the last message, or has left its worker.
        self._away: WeakSet[Celery] = WeakSet()
        self.homes = ""

    def add(self, app: Celery) -> None:
        """Send this app's messages as well."""
        if all(known is not app for known in self._living()):
            self._apps.append(ref(app, self._forget))
            self._know_homes()

    def _forget(self, gone: ref[Celery]) -> None:
        self._apps.remove(gone)
        self._know_homes()

    def _know_homes(self) -> None:
        self.homes = _joined(self._living())

    def reachable(self) -> str:
        """What is handed out in vain comes later each time, to whichever process. So a broker that
        has failed is asked first whether it answers."""
        living = self._living()
        for app in living:
            if app in self._away and answers(app):
                self._away.discard(app)
        return _joined(app for app in living if app not in self._away)

    def doubt(self, app: Any) -> None:
        """As for `Sender`."""
        self._away.add(app)

    def send(self, message: Message) -> None:
        """Publish a message to the queue that it came from, or to the resume queue beside, if a
        live worker consumes that.

        Raises:
            RelockError: its app is not one of this process, so it stays parked.

        Raises whatever the broker's client raises.
        """
        found = json.loads(message.text)
        app = next((app for app in self._living() if found["home"] in homes(app)), None)
        if app is None:
            raise RelockError("its app is not one of this process")
        # A burst's message is nowhere else from now on, and a resume queue can be deleted.
        is_burst = message.name.startswith(DEBOUNCE)
        queue, beside = "" if is_burst else found["queue"], None
        with suppress(LockUnavailable, LockConfigError):  # where it came from is always right
            if queue and self._consumed(channel(found["home"], queue)):
                beside = resume_queue(queue)
        try:
            publish(app, message.text, queue=beside)
        except Exception:
            self._away.add(app)
            raise
        if not is_burst:
            worker_events.tell_resumed(app, message, found["headers"])

    def _living(self) -> list[Celery]:
        # Over a copy: an app can go at any moment.
        return [app for known in [*self._apps] if (app := known()) is not None]


def _joined(apps: Iterable[Celery]) -> str:
    return " ".join(sorted(set().union(*map(homes, apps))))


def resume_queue(queue: str) -> str:
    """The name of the resume queue beside a queue."""
    return queue + SUFFIX


def channel(home: str, queue: str) -> str:
    """The key under which consumers of the resume queue beside a queue are announced.

    The home is in it, as two brokers may have queues of the same name.
    """
    return f"{home}:{resume_queue(queue)}"
