"""Messages that are sent again: at once with a countdown, or later, out of Redis, by whoever gives
the lock back.

Either way the run's id, parent, chain, chord, links, stamps, headers, expiry, priority and count of
retries stay as they are, and it goes to where it came from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from celery import Celery
from celery.backends.base import DisabledBackend
from celery.canvas import Signature
from kombu import serialization as _serialization
from kombu.exceptions import EncodeError

from ..engine import events, ids
from ..engine.parking import Parking
from ..engine.protocol import Message, ParkRequest
from . import headers
from .headers import RunHeader

serialization: Any = _serialization  # has types, and not for all of it

logger = logging.getLogger("celery_relock")
T = TypeVar("T")

# A message of more bytes is not parked: it stays with the broker, which is made for it.
LARGEST = 1_000_000


def sent_again(task: Any, message: Any, pause: float) -> bool:
    """Send a message again, to come back after a pause in seconds. False if that failed."""
    try:
        signature = _signature(task, message, countdown=pause, **_destination(task.app, message))
        with headers.resending(message, headers.read(message).again()):
            _by_a_serializer(
                task,
                lambda name: signature.apply_async(add_to_parent=False, serializer=name),
            )
    except Exception as error:
        if events.is_thrown_in(error):
            raise
        logger.warning("%s was not sent again, it stays in its slot", task.name, exc_info=True)
        return False
    return True


def park_request(
    task: Any, parking: Parking, message: Any, header: RunHeader, **bounds: Any
) -> ParkRequest | None:
    """A message as it is parked, with its next header; None, and a warning, if it has to stay with
    the broker. `bounds` as for `Parcel`."""
    signature = dict(_signature(task, message))
    try:
        name, content = _by_a_serializer(task, lambda name: (name, _written(signature, name)))
    except EncodeError as error:
        _warn_of(task, f"cannot be written ({error})")
        return None
    text = json.dumps(
        {
            "v": 1,
            "id": message.id,
            "parent": message.parent_id,
            "header": asdict(header),
            "serializer": name,
            "content": content,
            "delivery": message.delivery_info or {},
        }
    )
    if len(text) > LARGEST:
        _warn_of(task, f"is larger than {LARGEST} bytes")
        return None
    return ParkRequest(text, parking.home, ids.short(message.id), **bounds)


def _warn_of(task: Any, why: str) -> None:
    logger.warning(
        "a message of %s %s, so it is not parked in Redis: it is sent again and again until it "
        "finds the lock free",
        *(task.name, why),
    )


class _Origin(NamedTuple):
    """What a message that is sent on keeps, though another task sends it."""

    id: str
    parent_id: str | None
    delivery_info: Mapping[str, Any]


class CelerySender:
    """Sends parked messages to the broker of an app."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._home = ""

    @property
    def home(self) -> str:
        if not self._home:
            with self._app.connection_for_write() as connection:
                place = connection.as_uri()  # without the password
            # By name, too: another app on this broker may route its tasks another way.
            self._home = ids.digest(repr((self._app.main, place)).encode())
        return self._home

    def send(self, message: Message) -> None:
        found = json.loads(message.text)
        signature = Signature.from_dict(_read(self._app, *found["content"]), app=self._app)
        origin = _Origin(found["id"], found["parent"], found["delivery"])
        header = headers.parse(found["header"]) or RunHeader(message.execution_id)
        how = {"serializer": found["serializer"], **_destination(self._app, origin)}
        with headers.resending(origin, header):
            signature.apply_async(add_to_parent=False, **how)


def ignores_result(task: Any, message: Any) -> bool:
    """Whether a run stores no result, by its message or else by its task."""
    told = vars(message).get("ignore_result")
    return bool(task.ignore_result if told is None else told)


def stores_no_result(task: Any, message: Any = None) -> bool:
    """Whether nobody can ask the result backend what became of a run; without a message, of one of
    the task's."""
    ignored = task.ignore_result if message is None else ignores_result(task, message)
    return bool(ignored) or isinstance(task.backend, DisabledBackend)


def _signature(task: Any, message: Any, **options: Any) -> Signature:
    return task.signature_from_request(
        message,
        retries=message.retries,
        ignore_result=ignores_result(task, message),
        **options,
    )


def _destination(app: Celery, message: Any) -> dict[str, Any]:
    """What Celery does not say by itself when it sends a message to where it came from.

    Kombu's virtual transports (Redis, SQS …) take an exchange for a direct one until this process
    has declared it: by a topic exchange the message would reach no queue, and be lost.
    """
    info = message.delivery_info or {}
    for queue in app.amqp.queues.values():
        exchange = queue.exchange
        if exchange and exchange.name == info.get("exchange") and exchange.type != "direct":
            key = info.get("routing_key")
            return {"queue": queue, "exchange": exchange.name, "routing_key": key}
    return {}


def _by_a_serializer(task: Any, write: Callable[[str], T]) -> T:
    """Write with the task's serializer, or else with another one that the app takes: a worker is
    not told which one the message was sent with.

    Raises:
        EncodeError: none of them can.
    """
    conf, known = task.app.conf, serialization.registry.type_to_name
    first = task.serializer or conf.task_serializer
    others = [known.get(each, each) for each in conf.accept_content or ()]
    names = list(dict.fromkeys([first, *others]))
    while True:
        try:
            return write(names.pop(0))
        except EncodeError:
            if not names:
                raise


def _written(signature: dict[str, Any], serializer: str) -> tuple[str, str, str]:
    """Content type, encoding and text."""
    kind, encoding, body = serialization.dumps(signature, serializer=serializer)
    # Latin-1: every byte of a binary serializer is one character, and none is lost.
    return kind, encoding, body.decode("latin-1") if isinstance(body, bytes) else body


def _read(app: Celery, kind: str, encoding: str, text: str) -> dict[str, Any]:
    accepted = serialization.prepare_accept_content(app.conf.accept_content)
    body = text.encode("latin-1") if encoding == "binary" else text
    found: dict[str, Any] = serialization.loads(body, kind, encoding, accept=accepted)
    return found
