"""Connections that are kept, and the way to a Redis over them: scripts run where their keys are,
and are sent again when it may help.

They are `redis.Connection`s in a list of ours. redis-py's pools and clients hand an answer to the
wrong caller when a time limit's signal strikes, and send again unseen; a pool's limit, its lock and
its retries are not needed here. The recipe is in `ask`, and what is held to in all of this room:
one caller uses a connection at a time, it comes back only after every answer was read, and no
int or float is given to be packed (hiredis runs signal handlers in their repr, and crashes).

Every verb may be sent twice, so a command whose answer is lost is sent again, within a stated
patience (`Transport`). That one is for one server; `sentinel` and `cluster` say what is different
there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as AnswerTimeout

from ...engine import platform
from ...engine.protocol import Notice
from ...errors import LockConfigError, LockUnavailable
from .errors import FAULTS, TooFewReplicas, note_place, passes, translate
from .scripts import Script
from .subscription import Subscription

Call: TypeAlias = "tuple[Sequence[str], Sequence[str]]"
Command: TypeAlias = "tuple[str, ...]"
Channel: TypeAlias = "Callable[[int], str]"
Ready: TypeAlias = "Callable[[], None]"
Hear: TypeAlias = "Callable[[Notice], None]"
Wanted: TypeAlias = "Callable[[], bool]"

# So many are kept while nobody uses them, the last ones used; and none but the last for longer than
# so many seconds.
KEPT, KEPT_FOR = 4, 60.0
# One that was idle for so many seconds is looked at before use: the server may have gone and come
# back. Found out only by sending, nobody could tell whether the command was executed.
FRESH = 1.0
# Calls that are sent before the first answer is read: few enough for the buffers of a socket.
IN_FLIGHT = 4
# A give-back is no promise: lost with a master, it lets the lease end the hold.
PROMISES = ("acquire", "debounce", "renew", "heartbeat")
# How often a subscription is held against where it should lead to, and whether anybody wants it
# still, in seconds.
LOOK = 2.0


class Replicas(NamedTuple):
    """How many replicas have to have a hold before it counts, and how many seconds they have."""

    needed: int = 0
    timeout: float = 1.0

    def checked(self) -> Replicas:
        """Itself. Raises LockConfigError where it cannot be used."""
        if type(self.needed) is not int or self.needed < 0:
            raise LockConfigError(f"min_replicas={self.needed!r}: give their number, 0 for none")
        return self


NONE = Replicas()


class Effort:
    """What one command's way to its answer may take, in seconds for each answer, and has taken.

    Attributes:
        within: seconds for an answer, where they are fewer than the connection's own.
        once: nothing is sent a second time, so it goes by a new connection, which is not stale.
        unheard: how often it was sent, and may have been executed, without an answer. Up to
            `connect()` nothing is executed, and an error of the server's is an answer.
        sent: when the last try was sent, the one that was answered. A lease counts from then.
    """

    __slots__ = ("once", "sent", "unheard", "within")

    def __init__(self, within: float | None = None, once: bool = False) -> None:
        self.within = within
        self.once = once
        self.unheard = 0
        self.sent = 0.0


class Connections:
    """Connections to one server. Threads and greenlets take one for the time of one exchange; a
    forked child begins with none, and never touches the sockets that it inherited.

    Args:
        kind, options: redis-py's class of them, and its keywords.
        replicas: how many have to have a hold before it counts.
        limit: seconds for an answer and for a connect: those of the keep-alive thread, which has a
            list of its own, as under gevent a socket belongs to the thread that made it.
    """

    def __init__(
        self,
        kind: type[Any],
        options: Mapping[str, Any],
        replicas: Replicas = NONE,
        limit: float | None = None,
    ) -> None:
        self._kind = kind
        self._options = dict(options)
        self._limit = limit
        self._pid = platform.pid
        self._idle: deque[tuple[float, Any]] = deque()
        self._replicas = replicas

    def call(
        self, script: Script, calls: Sequence[Call], effort: Effort, asking: bool = False
    ) -> list[Any]:
        """The outcome of each call of a script: its reply, strings as bytes, or the error that the
        server answered. `asking`: the slot of the one call is on its way to this node.

        Raises:
            RedisError, OSError: there is no answer, or too few replicas have what it promises.
        """
        found: list[Any] = []
        for start in range(0, len(calls), IN_FLIGHT):
            part = calls[start : start + IN_FLIGHT]
            # Only the next command may go where the slot is not yet: no EVALSHA without its script.
            replies = self._send(script, part, effort, by_sha=not asking, asking=asking)
            if NoScriptError in map(type, replies):
                # EVAL, not SCRIPT LOAD: a failover cannot come between. Twice is as good as once.
                replies = self._send(script, part, effort, by_sha=False, asking=False)
            found += replies
        return found

    def _send(
        self, script: Script, calls: Sequence[Call], effort: Effort, by_sha: bool, asking: bool
    ) -> list[Any]:
        how = ("EVALSHA", script.sha) if by_sha else ("EVAL", script.source)
        commands: list[Command] = [(*how, str(len(k)), *k, *args) for k, args in calls]
        if asking:
            commands.insert(0, ("ASKING",))
        if not self._replicas.needed or script.name not in PROMISES:
            return self.ask(commands, effort)[asking:]
        # It counts what was written on its own connection, so it goes along.
        *replies, copies = self.ask([*commands, self._wait(effort.within)], effort)
        if any(promises(script, reply) for reply in replies[asking:]):
            if isinstance(copies, Exception):
                raise copies
            if copies < self._replicas.needed:
                effort.unheard += 1  # it has been executed, and does not count
                raise TooFewReplicas(
                    f"{copies} of {self._replicas.needed} replicas within "
                    f"{self._replicas.timeout:g} s"
                )
        return replies[asking:]

    def _wait(self, within: float | None) -> Command:
        answer = min(filter(None, (within, self._limit, self._options["socket_timeout"])))
        seconds = min(self._replicas.timeout, answer / 2)
        return "WAIT", str(self._replicas.needed), str(max(round(seconds * 1000), 1))

    def ask(self, commands: Sequence[Command], effort: Effort) -> list[Any]:
        """Send commands together and read the answer to each; an error of the server's is one.

        Raises:
            RedisError, OSError: there is no answer to one of them.
        """
        while True:
            new = self.make(effort.within) if effort.once else None
            link, idle = (new, None) if new else self._take(effort.within)
            try:
                if idle is None:
                    link.connect()
                effort.unheard += 1
                effort.sent = time.monotonic()
                link.send_packed_command(link.pack_commands(commands), check_health=False)
                answers = [_read(link, effort.within) for _ in commands]
                effort.unheard -= 1
            except BaseException as error:
                # Also at a signal in the middle of an answer: who came next would read the rest.
                link.disconnect()
                note_place(error, link, heard=idle is not None)
                if idle is None or not isinstance(error, FAULTS):
                    raise
                silent = isinstance(error, AnswerTimeout | TimeoutError)
                if silent and (effort.within or idle < FRESH):
                    raise
                # It may have gone stale while nobody used it, which says nothing of the server; so
                # may all others.
                self.close()
            else:
                self._keep(link, idle is None, effort.within)
                return answers

    def make(self, within: float | None = None) -> Any:
        """A connection that nobody keeps account of; it connects when it is used. `within`: seconds
        for its connect and each answer, where they are fewer than its own."""
        return self._made(within)

    @property
    def made_of(self) -> tuple[type[Any], dict[str, Any]]:
        """redis-py's class of them, and its keywords."""
        return self._kind, self._options

    def fits(self, link: Any) -> bool:
        """Whether a connection leads to where commands are to go now."""
        return True

    def close(self) -> None:
        """Close what is idle. What is in use closes when its exchange fails."""
        while self._idle:
            try:
                self._idle.pop()[1].disconnect()
            except IndexError:  # another thread was faster
                return

    def _made(self, within: float | None, **address: Any) -> Any:
        options = {**self._options, **address}
        if least := min(filter(None, (within, self._limit)), default=None):
            for name in ("socket_timeout", "socket_connect_timeout"):
                options[name] = min(options[name], least)
        return self._kind(**options)

    def _take(self, within: float | None) -> tuple[Any, float | None]:
        """A connection, and for how many seconds it was idle; None if it is new."""
        if self._pid != platform.pid:  # the answers to the parent's are the parent's
            self._idle, self._pid = deque(), platform.pid
        now = time.monotonic()
        while True:
            try:
                since, link = self._idle.pop()
            except IndexError:
                return self.make(within), None
            if self.fits(link) and (now - since < FRESH or _quiet(link)):
                return link, now - since
            link.disconnect()

    def _keep(self, link: Any, new: bool, within: float | None) -> None:
        if within and new and not self._limit:
            link.disconnect()  # made for less time than the next one may need
            return
        now, idle = time.monotonic(), self._idle
        idle.append((now, link))
        try:
            while len(idle) > KEPT or now - idle[0][0] > KEPT_FOR:
                idle.popleft()[1].disconnect()
        except IndexError:  # another thread took the last one
            return


def _read(link: Any, within: float | None) -> Any:
    if within and not link.can_read(within):
        raise AnswerTimeout(f"no answer within {within:g} s")
    try:
        return link.read_response(disable_decoding=True)
    except ResponseError as error:
        return error.with_traceback(None)  # which has the connection in it


def _quiet(link: Any) -> bool:
    """Whether a kept connection is as it was left: the end of one that was closed can be read."""
    try:
        return not link.can_read(0)
    except FAULTS:  # what it is does not matter: another is made
        return False


def promises(script: Script, reply: Any) -> bool:
    if isinstance(reply, Exception):
        return False
    if script.name in ("acquire", "debounce"):
        return reply[0] in (b"HELD", b"PARKED")
    return any(line == 1 or (isinstance(line, list) and line[0] == b"HELD") for line in reply)


class Transport:
    """The way to one server.

    Args:
        work, renewals: connections to it, the latter for the keep-alive thread.
        place: what tells this Redis from others; two with a part in common are one.
        replicas: how many have to have a hold before it counts.

    Attributes:
        fingerprint: the same for another way to it with the same options and credentials.
        where: the way of publishing that its scripts need.
        buckets: over how many its keys are spread.
    """

    # How long a command is repeated before the server counts as unreachable, in seconds.
    PATIENCE = 2.0
    # How long the next caller, so soon after, waits for an answer: giving back a lock that could
    # not be acquired must not double the time in which nothing happens.
    AFTER = BRIEF = 1.0
    PAUSES = (0.0, 0.05, 0.1, 0.2)

    fingerprint = ""
    where = "server"
    buckets = 1

    def __init__(
        self,
        work: Connections,
        renewals: Connections,
        place: Iterable[tuple[Any, ...]],
        replicas: Replicas = NONE,
    ) -> None:
        self.place = frozenset(place)
        self.replicas = replicas
        self._work = work
        self._renewals = renewals
        self._gave_up_at = -math.inf

    def run(
        self, script: Script, keys: Sequence[str], args: Sequence[str]
    ) -> tuple[Any, bool, float]:
        """Run one script. Returns its reply, strings as bytes; whether it may have been executed
        more than once; and when the try was sent that was answered (`time.monotonic()`).

        Raises:
            LockUnavailable, LockConfigError: translated from what redis-py raises.
        """
        started, tries = time.monotonic(), 0
        brief = started - self._gave_up_at < self.AFTER
        effort = Effort(self.BRIEF if brief else None)
        while True:
            try:
                reply = self._once(script, (keys, args), effort)
                if not isinstance(reply, Exception):
                    return reply, effort.unheard > 0, effort.sent
                raise reply
            except FAULTS as error:
                again = passes(error)
                patience = self.patience(error) if again and not brief else 0.0
                if time.monotonic() - started >= patience:
                    if again:
                        self._gave_up_at = time.monotonic()
                    raise translate(error, script.name) from error
            time.sleep(self.PAUSES[min(tries, len(self.PAUSES) - 1)])
            tries += 1

    def run_each(
        self,
        script: Script,
        calls: Sequence[Call],
        within: float | None = None,
        once: bool = False,
    ) -> list[Any]:
        """The outcome of each call, a reply or an error; one that failed is not repeated. `within`,
        `once`: as for `Backend.renew`."""
        links = self._renewals if within and not once else self._work
        try:
            return links.call(script, calls, Effort(within, once))
        except FAULTS as error:
            return [error] * len(calls)

    def at(self, key: str) -> Connections:
        """Where a key is. Raises RedisError if nobody can tell."""
        return self._work

    def masters(self) -> list[Connections]:
        """Every server that has keys. Raises as `at` does."""
        return [self._work]

    def route(self, bucket: int) -> object:
        """Which server has a bucket, as far as is known."""
        return None

    def listen(self, channel: Channel, ready: Ready, hear: Hear, wanted: Wanted) -> None:
        """Hear an inbox, see `Backend.listen`. `channel` is its name in a bucket."""
        subscription = Subscription(self._work.make, [channel(0)])
        try:
            ready()
            while self._work.fits(subscription.link):
                if not wanted():
                    return
                if (notice := subscription.hear(LOOK)) is not None:
                    hear(notice)
        finally:
            subscription.close()
        # A replica repeats the messages, but the master does not know that it is heard.
        raise LockUnavailable("the inbox's server is no longer the master")

    def close(self) -> None:
        """Close what is idle; all can still be used."""
        self._work.close()
        self._renewals.close()

    def _once(self, script: Script, call: Call, effort: Effort) -> Any:
        return self._work.call(script, [call], effort)[0]

    def patience(self, error: Exception) -> float:
        """For how many seconds a command that failed so is repeated."""
        return self.PATIENCE
