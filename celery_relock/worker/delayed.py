"""Messages that are due later, where a worker must not keep them: quorum queues of RabbitMQ.

A worker keeps a message with an ETA until it is due, and asks the broker for one more meanwhile. A
consumer of a quorum queue cannot ask for more: some messages that are due later would stop it. So
Celery, from 5.5 on, lets such a message wait in RabbitMQ, in queues that are there for the purpose,
unless its exchange is a direct one. (Its page on RabbitMQ, "Using Quorum Queues".) What the library
sends again waits there too, and then goes to its queue by name, whatever the exchange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

try:
    from celery.utils.quorum_queues import detect_quorum_queues
    from kombu.transport import native_delayed_delivery as waiting

    #: Celery's exchange for what has waited. The routing key there is the number of seconds in 28
    #: bits, with a dot behind each, and the one that the message had.
    IS_DUE: str | None = waiting.CELERY_DELAYED_DELIVERY_EXCHANGE
except ImportError:  # Celery 5.4 cannot consume from one
    IS_DUE = None

    def detect_quorum_queues(app: Any, driver_type: str) -> tuple[bool, str]:
        return False, ""


#: The header in which RabbitMQ notes in which queues a message has died, also by its time to live.
DEATHS = "x-death"
# How the names of the queues begin in which it waits.
_WAITING = "celery_delayed_"


def waits_in_broker(app: Any, producer: Any, queue: str, delay: float) -> tuple[str, str] | None:
    """Where to publish a message that is to come to a queue after so many seconds.

    Returns:
        Exchange and routing key; None where a worker keeps it until it is due.

    Raises whatever the broker's client raises.
    """
    seconds = math.ceil(delay)
    found = app.amqp.queues.get(queue)
    if delay < 1 or found is None:  # it waits for whole seconds
        return None
    if not detect_quorum_queues(app, producer.connection.transport.driver_type)[0]:
        return None
    key = f"relock.{queue}"
    # Each time, as a queue can be deleted; nothing is changed if it is bound already.
    found.bind(producer.channel).bind_to(IS_DUE, routing_key=f"#.{key}")
    return waiting.level_name(waiting.MAX_LEVEL), waiting.calculate_routing_key(seconds, key)


def key_before(routing_key: str) -> str:
    """The routing key that a message had before it waited; see `IS_DUE`."""
    return routing_key.split(".", waiting.MAX_NUMBER_OF_BITS_TO_USE)[-1]


def without_waiting(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Headers, without what `DEATHS` says of queues in which the message has waited: when it waits
    there once more, RabbitMQ would take it for one that goes in a circle, and drop it.
    [https://www.rabbitmq.com/docs/dlx#automatic-dead-lettering-cycles]"""
    kept = dict(headers)
    deaths = kept.pop(DEATHS)
    is_list = isinstance(deaths, list)  # a sender can write anything
    others = [each for each in deaths if not _is_of_waiting(each)] if is_list else deaths
    return {**kept, DEATHS: others} if others else kept


def _is_of_waiting(death: Any) -> bool:
    return isinstance(death, Mapping) and str(death.get("queue")).startswith(_WAITING)
