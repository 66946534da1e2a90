"""Listening for the notices that are published to one inbox.

redis-py's PubSub is not used: it does not notice a connection whose other end is silently gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import ClusterDownError, MovedError, ResponseError

from ...engine.platform import native_lock, start_native_thread
from ...engine.protocol import STILL_WANTED, Listener, Notice
from ...errors import LockUnavailable, RelockError
from .errors import FAULTS, translate

if TYPE_CHECKING:
    from .cluster import Map, Node

# After ASK seconds of silence a connection gets PINGs; after GIVE_UP seconds it counts as gone.
ASK, GIVE_UP = 15.0, 30.0
# In seconds: how often the listeners of a cluster are compared with this process's map of it, how
# often the cluster itself is asked, and how soon a failed listener is replaced.
_LOOK_EVERY, _ASK_EVERY, _AGAIN = 0.5, 10.0, 2.0


class Subscription:
    """One connection that is subscribed to channels, for one thread.

    Args:
        connect: returns a redis-py connection that nobody else uses.
        channels: the channels.
        sharded: whether these are shard channels of a cluster, at the node of their slot. Without
            the permission, and before Redis 7.0, it subscribes to plain channels.

    Raises:
        LockUnavailable, LockConfigError: the connection or the subscription fails.
    """

    def __init__(
        self, connect: Callable[[], Any], channels: Sequence[str], sharded: bool = False
    ) -> None:
        self.link: Any = None
        self._heard = time.monotonic()
        try:
            self.link = connect()
            self.link.connect()
            if not (sharded and self._subscribe_sharded(channels)):
                self._subscribe([("SUBSCRIBE", *channels)], len(channels))
        except BaseException as error:
            self.close()
            if isinstance(error, MovedError):
                raise LockUnavailable(f"a slot of the inbox has moved: {error}") from error
            if isinstance(error, FAULTS):
                raise translate(error) from error
            raise

    def hear(self, seconds: float) -> Notice | None:
        """The next notice; None after so many seconds, or if anything else came.

        Raises:
            LockUnavailable: the connection is gone.
        """
        try:
            if not self.link.can_read(seconds):
                self._ask_after_silence()
                return None
            word = self._next()
        except FAULTS as error:
            raise LockUnavailable(f"the inbox lost its connection: {error}") from error
        if word[0] == b"sunsubscribe":
            raise LockUnavailable("a slot of the inbox has moved")
        # An empty message only asks whether anybody listens.
        return _notice(word[2]) if word[0] in (b"message", b"smessage") and word[2] else None

    def close(self) -> None:
        """End the connection."""
        if self.link is not None:
            self.link.disconnect()

    def _subscribe_sharded(self, channels: Sequence[str]) -> bool:
        try:
            # A command is for one slot. Send the first alone, because it can be refused.
            for part in (channels[:1], channels[1:]):
                self._subscribe([("SSUBSCRIBE", channel) for channel in part], len(part))
        except ResponseError as error:
            if isinstance(error, MovedError | ClusterDownError):
                raise
            return False
        return True

    def _subscribe(self, commands: Sequence[tuple[str, ...]], count: int) -> None:
        packed = self.link.pack_commands(commands)
        self.link.send_packed_command(packed, check_health=False)
        while count:
            count -= self._next()[0] in (b"subscribe", b"ssubscribe")

    def _next(self) -> Any:
        word = self.link.read_response(disable_decoding=True)
        self._heard = time.monotonic()
        return word if isinstance(word, list) else [word]

    def _ask_after_silence(self) -> None:
        silent = time.monotonic() - self._heard
        if silent > GIVE_UP:
            raise LockUnavailable("the inbox's connection no longer answers")
        if silent > ASK:
            self.link.send_command("PING", check_health=False)


@dataclass(eq=False)
class ClusterInbox:
    """Listens at every master, for the buckets that it serves: the scripts count the receivers of a
    message, and a node knows its own listeners alone. Each master has a native thread. The threads
    follow the buckets when slots move and when a replica takes over. Heartbeats find out what was
    missed meanwhile.

    Attributes:
        connect: returns a connection to a node.
        channel, listener: as for `Transport.listen`; `ready` is called for each thread.
    """

    map: Map
    connect: Callable[[Node], Any]
    channel: Callable[[int], str]
    listener: Listener

    def __post_init__(self) -> None:
        self._bell = native_lock()
        self._bell.acquire()
        self._ears: dict[Node, _Ear] = {}

    def listen(self) -> None:
        """Listen while it is wanted.

        Raises:
            LockUnavailable, LockConfigError: no master can be listened to.
        """
        asked_at = 0.0
        try:
            while self.listener.wanted():
                now = time.monotonic()
                if now - asked_at >= _ASK_EVERY or any(ear.error for ear in self._ears.values()):
                    asked_at = now
                    with suppress(*FAULTS):  # the threads that listen already go on
                        self.map.look()
                self._follow(now)
                self._bell.acquire(timeout=_LOOK_EVERY)
        finally:
            for ear in self._ears.values():
                ear.over = True

    def _follow(self, now: float) -> None:
        """Make sure that there is a thread for each master and its buckets."""
        try:
            masters = self.map.masters()
        except FAULTS as error:
            raise translate(error) from error
        for node, buckets in masters.items():
            ear = self._ears.get(node)
            if ear is None or ear.buckets != buckets or (ear.error and now >= ear.again_at):
                if ear is not None:
                    ear.over = True
                self._ears[node] = _Ear(buckets)
                start_native_thread(partial(self._be, node, self._ears[node]))
        for node in self._ears.keys() - masters.keys():
            self._ears.pop(node).over = True
        errors = [ear.error for ear in self._ears.values()]
        if errors[0] is not None and all(errors):
            raise errors[0]

    def _be(self, node: Node, ear: _Ear) -> None:
        subscription = None
        try:
            channels = [self.channel(bucket) for bucket in ear.buckets]
            subscription = Subscription(partial(self.connect, node), channels, sharded=True)
            self.listener.ready()
            while not ear.over:
                if (notice := subscription.hear(STILL_WANTED)) is not None:
                    self.listener.hear(notice)
        except RelockError as error:
            ear.fails(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, a new thread tries again
            ear.fails(LockUnavailable(f"the inbox at {node.host}:{node.port}: {error!r}"))
        finally:
            if subscription is not None:
                subscription.close()
            with suppress(RuntimeError):  # it rings already
                self._bell.release()


@dataclass(eq=False)
class _Ear:
    """A thread that listens at one node: for which buckets, whether it must end, why it ended, and
    when another is to try."""

    buckets: Sequence[int]
    over: bool = False
    error: RelockError | None = None
    again_at: float = 0.0

    def fails(self, error: RelockError) -> None:
        self.again_at = time.monotonic() + _AGAIN
        self.error = error


def _notice(data: bytes) -> Notice | None:
    """The published notice; None for anything that our scripts do not publish."""
    try:
        kind, execution_id, attempt_id, *fence = data.decode().split(" ")
        return Notice(kind, execution_id, attempt_id, int(fence[0]) if fence else 0)
    except ValueError:  # also for bytes that are not UTF-8, and a number with too many digits
        return None
