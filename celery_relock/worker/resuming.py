"""A turn that has come is used: who publishes parked messages in time, and where they come in.

Normally the process that releases a lock publishes the next message itself. Every worker's main
process looks as well (`Resumer`): when a process calls that could not (another app, a plain
`Lock`), when a lease that stood in the way has ended, when a published message did not arrive, when
the time to wait is over. There is no leader and no beat: the first to look gets the message.

A message that is published to the queue that it came from stands behind that queue's backlog, and
its lock idle. So a worker consumes, beside each of its queues, a resume queue (`ResumeQueues`), and
the resumer announces that in the lock Redis: what is published meanwhile goes there. A worker
without a free slot requeues what it gets from there, and gets no more until a slot was free:
so a message goes to the first that is free.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

from celery import bootsteps
from celery.signals import task_postrun
from celery.worker.state import (
    active_requests,
    all_total_count,
    requests,
    reserved_requests,
    task_ready,
)
from kombu import Consumer, Exchange, Queue
from kombu.common import Broadcast, ignore_errors

from ..engine import ids
from ..engine.engine import Engine
from ..engine.events import logger
from ..engine.outage import Outage
from ..engine.platform import fork_gate, start_native_thread
from ..engine.protocol import Listener, Notice
from ..errors import LockUnavailable, RelockError
from .broker import is_amqp
from .message import HEADER, parse
from .parking import SUFFIX, channel, come_back, homes_of_broker, resume_queue
from .unlocked import note_unreadable

# Seconds between two looks of a worker. When something is known to be due sooner, it looks then.
LOOK_EVERY = 1.0
# Seconds until a queue is noticed that the worker begins or ceases to consume.
FOLLOW_EVERY = 0.25
# Seconds for which a worker counts as a consumer of a resume queue after it has said so. What is
# published there after it was killed is published again some seconds later.
LIVES = 6.0
# Seconds between two such announcements.
ANNOUNCE_EVERY = 2.0
# Seconds for which a message is not published again after this worker has said that it has it. It
# says so for as many seconds: another worker may have a slot by then.
TRIP = 5.0
# So many revoked tasks are looked for at a time, in a few ms of the server's time. A worker can be
# told of 50,000 at once.
MOST_REVOKED = 1000
# Seconds between two looks for a slot, while the resume queues are not consumed.
LOOK_FOR_SLOT = 0.02
# Seconds for which Redis is asked for a message at a time (`brpop_timeout` of kombu).
ASKED = 1.0
# Seconds for which a message that was requeued counts as one that waits in its queue, unless it
# is received before. Somebody else may have been killed with it.
REQUEUED = 60.0
# After so many seconds without a turn of its main loop a worker counts as no consumer. While a body
# runs there (solo), it does.
STUCK = 3.0
# A resume queue lives as long as the queue that it is beside: it can have the only copy of a
# message, that of an execution that had begun (`acks_late`) when its worker was killed. Beside a
# queue that goes with its worker, RabbitMQ deletes it after so many milliseconds without a
# consumer. It is a classic queue also where a virtual host makes quorum queues by default: these
# drop what is requeued too often. Neither can ever change: RabbitMQ refuses to declare a queue that
# exists with other arguments.
EXPIRES = 1_800_000
_ON_AMQP: Mapping[str, Any] = {"x-queue-type": "classic"}
# What a queue of RabbitMQ promises and a queue beside it would not: where a rejected message goes,
# and that one consumer at a time has them all.
_NOT_BESIDE = {"x-dead-letter-exchange", "x-single-active-consumer"}
# Bytes of a queue name on RabbitMQ (AMQP 0-9-1: a short string).
_LONGEST_NAME = 255
# What RabbitMQ answers (AMQP 0-9-1, "reply-code"): no right, and other arguments.
_FOR_GOOD = (403, 406)
_NOT_FOUND = 404
# Seconds after which a resume queue is looked for again that could not be had for another reason:
# the node of a cluster that it is on was away.
AGAIN_AFTER = 60.0
# A connection on which an answer may take its time; and seconds until the next one is tried.
_SLOW, _PAUSE = {"read_timeout": 120.0}, 2.0


class Resumer:
    """Publishes the parked messages of an engine that are due, in a thread of its own.

    It also announces which resume queues this worker consumes.

    Args:
        engine: of the app's locks; its sender publishes.
        revoked: the ids of the tasks that are revoked at the moment. Celery finds out that a task
            is revoked when a worker receives it, so one that is parked is published then.
        received: the execution ids of messages that were parked, were resumed, and wait in this
            worker for a slot.
        in_body: whether the worker's main loop executes a body, as that of the solo pool does.
    """

    def __init__(
        self,
        engine: Engine,
        revoked: Callable[[], Iterable[str]],
        received: Callable[[], Iterable[str]],
        in_body: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._all_revoked = revoked
        self._received = received
        self._in_body = in_body
        self._in_body_at = 0.0
        self._since: dict[str, float] = {}
        self._requeued: dict[str, float] = {}
        self._bell = threading.Event()
        self._stopped = False
        self._revoked: set[str] = set()
        self._worker = ids.new_attempt_id()
        self._consumed: tuple[frozenset[str], float] = frozenset(), 0.0
        self._announced: frozenset[str] = frozenset()
        self._announced_at = 0.0

    def start(self) -> None:
        """Begin; the first look publishes what an earlier worker left."""
        threading.Thread(target=self._live, name="relock-resumer", daemon=True).start()
        # Not as a greenlet: for the nodes of a cluster it waits as a thread does.
        start_native_thread(self._listen)

    def stop(self) -> None:
        """End within a second."""
        self._stopped = True
        self._bell.set()

    def consumes(self, channels: Iterable[str]) -> None:
        """Take these channels for all that the worker consumes, until `STUCK` seconds after this,
        or after the body that its main loop executes."""
        before, _ = self._consumed
        self._consumed = frozenset(channels), time.monotonic()
        if self._consumed[0] != before:
            self._bell.set()

    def left_broker(self, app: Any) -> None:
        """This worker is not connected to its broker, and may have lost it."""
        self._engine.parking.sender.doubt(app)

    def requeued(self, execution: str) -> None:
        """This execution waits in its resume queue, as no worker seems to have a free slot."""
        now = time.monotonic()
        known = {each: at for each, at in self._requeued.items() if now - at < REQUEUED}
        self._requeued = {execution: now, **known}

    def has_slot(self) -> None:
        """What was requeued may come again, to this worker or another."""
        self._requeued = {}

    def _waiting(self) -> list[str]:
        """The executions that are not to be published again for `TRIP` seconds."""
        now = time.monotonic()
        self._since = {each: self._since.get(each, now) for each in self._received()}
        here = [each for each, since in self._since.items() if now - since < TRIP]
        return here + [each for each, at in self._requeued.items() if now - at < REQUEUED]

    def _live(self) -> None:
        self._warn()
        outage = Outage("looking for parked tasks")
        while not self._stopped:
            pause = LOOK_EVERY * ids.chance.uniform(0.8, 1.2)  # not all workers at once
            with outage:
                # In a cluster the server that is told can be another one than those that are asked.
                with suppress(LockUnavailable):
                    self._announce()
                if waiting := self._waiting():
                    self._engine.backend.arrived(waiting, TRIP)
                due = self._look()
                pause = pause if due is None else min(pause, due)
            self._bell.wait(pause)
            self._bell.clear()

    def _announce(self) -> None:
        (channels, told), now = self._consumed, time.monotonic()
        if self._in_body():
            # It mostly ends with a release, and then there is a slot.
            self._in_body_at = now
        if now - max(told, self._in_body_at) > STUCK:
            channels = frozenset()
        if gone := self._announced - channels:
            self._engine.backend.announce(sorted(gone), self._worker, 0)
        due = time.monotonic() - self._announced_at > ANNOUNCE_EVERY
        if channels and (due or channels != self._announced):
            self._engine.backend.announce(sorted(channels), self._worker, LIVES)
            self._announced_at = time.monotonic()
        self._announced = channels

    def _look(self) -> float | None:
        revoked = set(self._all_revoked())
        new = [*(revoked - self._revoked)][:MOST_REVOKED]
        due = self._engine.parking.resume([ids.short(task) for task in new])
        self._revoked = self._revoked & revoked | {*new}
        return due if len(self._revoked) == len(revoked) else 0.0

    def _listen(self) -> None:
        listener = Listener(self._bell.set, self._hear, lambda: not self._stopped)
        while not self._stopped:
            try:
                self._engine.backend.listen("parked", listener)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is tried again
                logger.debug("the resumer does not hear, it looks by itself: %s", error)
                time.sleep(LOOK_EVERY)

    def _hear(self, notice: Notice) -> None:
        if notice.attempt_id in self._engine.parking.sender.homes.split():
            self._bell.set()

    def _warn(self) -> None:
        # Here, after the pool has forked: no child needs them.
        from ..engine.diagnosis import serious
        from ..engine.inspection import Inspectable

        backend = self._engine.backend
        if not isinstance(backend, Inspectable):
            return
        with suppress(RelockError):  # who cannot reach it hears of that soon enough
            for found in serious(backend.examination().servers(trips=0)):
                logger.warning("the Redis of the locks: %s. %s %s", found.what, found.why, found.do)


class ResumeQueues(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery ships no types
    """Consumes a resume queue beside each queue that the worker consumes, by a channel of its own.

    The worker's consumer, its queues, their order and `inspect active_queues` stay as they are.
    There are resume queues on Redis and RabbitMQ. On other brokers a resumed message goes to the
    queue that it came from.

    A resumed message for which there is no slot is requeued, and nothing more is consumed until
    there is one. A worker with a backlog shows no free slot: where a task ends, the next one that
    Celery has received begins at once. So one message is taken, behind those, once a task has
    ended.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, c: Any, **_: Any) -> None:
        self._c = c
        self._consumer: Any = None
        self._window = 0
        self._timer: Any = None
        self._closing: Any = None  # the channel of a consumer that was cancelled
        # Resume queues that are there, each by the name of the queue beside it.
        self._known: dict[str, Any] = {}
        self._known_at = 0.0
        self._refused: dict[str, float] = {}  # until when, by the name of the queue beside it
        self._declaring: dict[str, threading.Thread] = {}
        self._take: Any = None  # receives a message as any other
        # Whether nothing is consumed until there is a slot; and how many tasks had ended then.
        self._closed = False
        self._ended = 0
        self._slot_timer: Any = None
        self._turned = 0.0  # when the main loop began anew

    def include_if(self, c: Any) -> bool:
        return resumer_of(c) is not None

    def create(self, c: Any) -> None:
        note_unreadable(c)

    def start(self, c: Any) -> None:
        if c.connection.transport.driver_type not in ("redis", "amqp"):
            return
        self._take, self._closed = _handler(c), False
        self._turned = time.monotonic()
        if c.hub:
            c.hub.on_tick.add(self._tick)
        self._open()
        self._known.clear()
        self._declaring.clear()
        # Not here: RabbitMQ would deliver before the pool is ready.
        c.call_soon(self._sync)
        self._timer = c.timer.call_repeatedly(FOLLOW_EVERY, c.call_soon, (self._sync,))

    def stop(self, c: Any) -> None:
        # The channel stays open: what it has delivered is still to be acknowledged by it.
        if self._timer is not None:
            c.timer.cancel(self._timer)
            self._timer = None
        resumer_of(c).left_broker(c.app)
        consumer, self._consumer = self._consumer, None
        # What still comes is requeued: RabbitMQ may deliver before it answers that it is cancelled.
        self._closed = True
        if consumer is not None:
            self._closing = consumer.channel
            ignore_errors(c, consumer.cancel)
        self._forget_slot_timer()
        if c.hub:
            c.hub.on_tick.discard(self._tick)
        self._tell(())

    def shutdown(self, c: Any) -> None:
        self.stop(c)
        if self._closing is not None:
            ignore_errors(c, self._closing.close)
            self._closing = None

    def _open(self) -> None:
        c = self._c
        made = c.connection.channel()
        for each in () if is_amqp(c.connection) else (made, c.task_consumer.channel):
            each.close = partial(_close, each, c.connection_errors)
        self._window = _window(c)
        made.basic_qos(0, self._window, False)
        self._consumer = Consumer(
            made,
            [],
            auto_declare=False,
            accept=c.app.conf.accept_content,
            on_decode_error=c.on_decode_error,
            # Without a hub, looks for a slot would be late, and such a pool has hundreds of them.
            on_message=self._receive if c.hub else self._take,
        )

    def _receive(self, message: Any) -> None:
        """Take a message if there is a slot for it."""
        if not self._closed and _has_free_slot(self._c):
            self._take(message)
            return
        if not self._closed:  # else it comes while the consuming is being ended
            self._closed, self._ended = True, _ended()
            self._end_consuming()
            # In the prefork pool the end of a task wakes the main loop, too.
            self._slot_timer = self._c.timer.call_repeatedly(LOOK_FOR_SLOT, lambda: None)
        if header := parse(message.headers.get(HEADER)):  # else somebody else has put it there
            resumer_of(self._c).requeued(header.execution_id)
        message.requeue()

    def _tick(self) -> None:
        """Called whenever the main loop begins anew, before it sleeps."""
        if not self._is_to_take():
            return
        self._forget_slot_timer()
        self._closed = False
        resumer_of(self._c).has_slot()
        self._reopen()
        # The pool and the broker's client may have prepared for the sleep before this: what has
        # been handed to them since would wait until it ends.
        for prepare in list(self._c.hub.on_tick):
            if prepare != self._tick:
                prepare()

    def _is_to_take(self) -> bool:
        """Whether a slot is free again, or a body has kept the main loop from its turns (solo):
        until Redis is asked again, and heard, two more bodies of the worker's own queue would run.
        """
        before, self._turned = self._turned, time.monotonic()
        if not self._c.pool.active:
            return False
        if self._closed:
            return _has_free_slot(self._c) or _ended() > self._ended
        was_kept = self._turned - before > ASKED and not is_amqp(self._c.connection)
        return was_kept and _has_free_slot(self._c)

    def _forget_slot_timer(self) -> None:
        if self._slot_timer is not None:
            self._c.timer.cancel(self._slot_timer)
            self._slot_timer = None

    def _end_consuming(self) -> None:
        for queue in self._consumer.queues:
            self._consumer.cancel_by_queue(queue.name)

    def _reopen(self) -> None:
        """A slot is free: take from the queues before the worker's own has filled it."""
        try:
            for queue in list(self._known.values()):
                beside = queue(self._consumer.channel)
                if message := beside.get(accept=self._consumer.accept):
                    self._take(message)
                    break
        except self._c.connection.channel_errors:  # somebody has deleted the queue
            self._renew()
        self._sync()

    def _renew(self) -> None:
        """The broker has closed the channel."""
        before = self._consumer
        self._open()
        ignore_errors(self._c, before.channel.close)

    def _sync(self) -> None:
        """Follow the worker's own consumer. Called in the worker's main loop."""
        c = self._c
        if self._consumer is None or c.task_consumer is None or c.blueprint.state != bootsteps.RUN:
            return  # between two connections, or the worker could not start
        try:
            now = time.monotonic()
            queues = [q for q in c.task_consumer.queues if self._refused.get(q.name, 0.0) < now]
            amqp = is_amqp(c.connection)
            wanted = {queue.name: queue for queue in queues if not _is_alone(queue, amqp)}
            if self._closed:
                self._keep_known()
            else:
                if self._window != _window(c):  # `pool_grow`, `pool_shrink`
                    self._window = _window(c)
                    self._consumer.channel.basic_qos(0, self._window, False)
                    self._end_consuming()  # RabbitMQ goes by what was said before that began
                self._follow(wanted)
            # A worker without a slot counts, too: else the message would go behind the backlog.
            self._tell(self._known.keys() & wanted.keys())
        except (*c.connection_errors, *c.channel_errors) as error:
            # The worker's own loop meets it too, and connects anew.
            logger.debug("the resume queues are not looked after: %s", error, exc_info=True)

    def _follow(self, wanted: Mapping[str, Any]) -> None:
        for queue in [each for each in self._consumer.queues if _origin(each) not in wanted]:
            self._consumer.cancel_by_queue(queue.name)
            self._known.pop(_origin(queue), None)
        amqp = is_amqp(self._c.connection)
        for name, queue in wanted.items():
            beside = _beside(queue, amqp)
            if not amqp:
                self._known[name] = beside  # Redis makes a queue of what is sent to it
            if name not in self._known:
                self._declare(name, beside)
            elif not self._consumer.consuming_from(beside.name):
                self._consume(name, beside)

    def _declare(self, name: str, queue: Any) -> None:
        """Declare a queue of RabbitMQ, which `_follow` consumes then.

        Not in the worker's main loop: in a cluster that lost the node of a queue, the answer takes
        a minute.
        """
        if len(queue.name.encode()) > _LONGEST_NAME:
            why = f"its name would have more than {_LONGEST_NAME} bytes"
            self._refuse(name, why, for_good=True)
            return
        before = self._declaring.get(name)
        if before is not None and before.is_alive():
            return
        c, refusals = self._c, self._c.connection.channel_errors

        def declare() -> None:
            try:
                with (
                    fork_gate.closed(),
                    c.app.connection_for_read(transport_options=_SLOW) as connection,
                ):
                    queue(connection.channel()).declare()
                self._known[name] = queue
            except refusals as error:
                self._refuse(name, error)
            except Exception as error:  # noqa: BLE001  # whatever the broker's client raises
                logger.debug("a resume queue cannot be declared: %s", error, exc_info=True)
                time.sleep(_PAUSE)  # in which nobody tries again

        thread = threading.Thread(target=declare, name="relock-declare", daemon=True)
        self._declaring[name] = thread
        # Not here: under gevent a start lets other greenlets go on. After a reconnect Celery's
        # acknowledgements read from the connection that the main loop reads from next.
        c.timer.call_after(0, thread.start)

    def _keep_known(self) -> None:
        """RabbitMQ must not take the queues for unused."""
        if time.monotonic() - self._known_at > EXPIRES / 1000 / 3:
            self._known_at = time.monotonic()
            for name, queue in list(self._known.items()):
                self._declare(name, queue)

    def _consume(self, name: str, queue: Any) -> None:
        try:
            self._consumer.add_queue(queue)
            self._consumer.consume()
            self._known_at = time.monotonic()
        except self._c.connection.channel_errors as error:
            self._known.pop(name, None)  # declared anew, if somebody has deleted it
            if getattr(error, "code", None) != _NOT_FOUND:
                self._refuse(name, error)
            self._renew()

    def _refuse(self, name: str, why: object, *, for_good: bool = False) -> None:
        self._known.pop(name, None)
        for_good = for_good or getattr(why, "code", None) in _FOR_GOOD
        self._refused[name] = float("inf") if for_good else time.monotonic() + AGAIN_AFTER
        text = "no resume queue beside %r: a resumed task goes to the end of that queue (%s)%s"
        logger.warning(text, name, why, "" if for_good else "; it is tried again in a minute")

    def _tell(self, queues: Iterable[str]) -> None:
        of = homes_of_broker(self._c.app)
        resumer_of(self._c).consumes(channel(*each) for each in product(of, queues))


def resumer_of(c: Any) -> Any:
    """The resumer of a worker, by its consumer; None if the worker has none."""
    return getattr(c.controller, "relock_resumer", None)


def _window(c: Any) -> int:
    """As wide as the worker's own, 0 without a bound; not by `initial_prefetch_count`, which is
    lowered for a while after a reconnect."""
    return int(_slots(c) * c.prefetch_multiplier)


def _slots(c: Any) -> int:
    """How many slots the worker has, or can come to have by itself (`--autoscale`)."""
    scaler = getattr(c.controller, "autoscaler", None)  # whose bound changes: `control autoscale`
    # Before Celery 5.7 the gevent pool's `num_processes` says how many tasks run at the moment.
    slots = (c.pool.limit if c.pool.is_green else c.pool.num_processes) or 1
    return max(scaler.max_concurrency if scaler else 1, slots)


def _has_free_slot(c: Any) -> bool:
    # A cold shutdown ends the pool first, and messages still come.
    return c.pool.active and len(reserved_requests) - _not_begun() < _slots(c)


def _not_begun() -> int:
    """How many tasks Celery counts as active for as long as the worker lives, though no body began:
    they were to be terminated when they began (`revoke`), and the pool of threads terminates none.
    """
    with suppress(RuntimeError):  # a thread has just begun or ended one; the next look is soon
        return sum(each._terminate_on_ack is not None for each in active_requests)
    return 0


def _ended() -> int:
    """How many tasks have ended in this worker."""
    return int(all_total_count[0]) - len(active_requests)


def _escapes(task_id: str = "", **_: Any) -> None:
    """A task ends with what its tracer does not catch: `sys.exit()`, a cancelled coroutine.

    Celery's pools that run it in the worker's own process do not see that it has ended. It would
    count as active, and its slot as busy, for as long as the worker lives.
    """
    request = requests.get(task_id)
    if request is not None and sys.exc_info()[0] is not None:
        task_ready(request)


task_postrun.connect(_escapes, weak=False, dispatch_uid="celery_relock.slots")


def _close(channel: Any, failed: tuple[type[Exception], ...]) -> None:
    """Close a channel of Redis, which after a lost connection takes two tries: the first one reads
    from the socket that is gone.

    Kombu makes the second one only of the channel by which it heard of the loss: without ours that
    is mostly the worker's own. Of that it is too late afterwards: what it cannot put back then is
    an AttributeError, which ends the worker.
    """
    try:
        type(channel).close(channel)
    except failed:
        with suppress(*failed):
            type(channel).close(channel)


def _beside(queue: Any, amqp: bool) -> Any:
    """The resume queue beside a queue."""
    name, arguments = resume_queue(queue.name), _ON_AMQP if amqp else None
    expires = queue.expires or "x-expires" in (queue.queue_arguments or {})
    if amqp and (queue.auto_delete or queue.exclusive or not queue.durable or expires):
        arguments = {**_ON_AMQP, "x-expires": EXPIRES}
    return Queue(name, Exchange(""), name, queue_arguments=arguments)


def _is_alone(queue: Any, amqp: bool) -> bool:
    """Whether a queue has no resume queue beside it: what was parked comes back to itself."""
    ways = (queue, *(queue.bindings or ()))
    is_fanout = any(way.exchange is not None and way.exchange.type == "fanout" for way in ways)
    # Of such a queue each worker has one of its own: beside them there would be one for all.
    has_copies = is_fanout and not amqp and not isinstance(queue, Broadcast)
    return has_copies or bool(_NOT_BESIDE & (queue.queue_arguments or {}).keys())


def _origin(queue: Any) -> str:
    return str(queue.name.removesuffix(SUFFIX))


class _Unlimited:
    """A worker's consumer without rate limits.

    An execution that is resumed has spent its token when it came first, and did not run then.
    """

    disable_rate_limits = True

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self.strategies = self

    def __getitem__(self, name: str) -> Any:
        """How a task is received, made for each message: an app may get tasks, or other tasks of
        the same names, while its worker runs."""
        return self.app.tasks[name].start_strategy(self.app, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


def _handler(c: Any) -> Callable[[Any], Any]:
    """What receives a message from a resume queue, as the worker receives any message."""
    take = type(c).create_task_handler(_Unlimited(c))

    def handle(message: Any) -> Any:
        come_back(message)
        # Kombu's Redis has it in the headers, too, of what a full worker has requeued.
        message.headers.pop("redelivered", None)
        return take(message)

    return handle
