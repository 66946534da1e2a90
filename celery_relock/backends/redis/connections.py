"""Connections to a Redis, and the transport over them: it runs scripts where their keys are, and
repeats a command if that can help.

The connections are `redis.Connection`s in a list of our own. redis-py's pools and clients give an
answer to the wrong caller when a time limit's signal strikes, and they repeat commands unseen.
`exchange` has the recipe. This folder keeps three rules: one caller uses a connection at a time; a
connection returns to the list only after every answer was read; and no int or float is packed
(hiredis runs signal handlers in their repr, and crashes).

A command whose answer is lost is sent again, within a stated patience (`Transport`): every verb can
be sent twice, but for those in `ONCE`. `sentinel` and `cluster` say what differs there.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as AnswerTimeout

from ...engine import platform
from ...engine.platform import clock
from ...engine.protocol import STILL_WANTED, Listener
from ...errors import LockConfigError, LockUnavailable
from .errors import FAULTS, TooFewReplicas, demoted, note_address, passes, refused, translate
from .keys import bucket_of
from .scripts import Script
from .subscription import Subscription

Call: TypeAlias = "tuple[Sequence[str], Sequence[str]]"
Command: TypeAlias = "tuple[str, ...]"
Encoded: TypeAlias = "tuple[bytes, ...]"
Channel: TypeAlias = "Callable[[int], str]"

# How many idle connections to keep; and for how many seconds they are used again: a router between
# may forget an older one, and swallow what is sent. The last one is closed when another is needed.
MOST_IDLE, IDLE_FOR = 4, 60.0
# A connection that was idle for so many seconds is tested before use: the server can have
# restarted. If a command found that out, nobody could tell whether it was executed.
FRESH = 1.0
# Seconds to wait for an answer where the last caller waited in vain.
BRIEF = 1.0
# So much longer than for a step of it a new connection is waited for: the step's error says more.
_LONGER = 1.25
# Calls to send before the first answer is read: few enough for the buffers of a socket.
IN_FLIGHT = 4
# The verbs that must reach the replicas. A release need not: if it is lost with a master, the lease
# ends the hold, also one that was to be left to a retry or a next step, which are told of the gap.
REPLICATED = ("acquire", "debounce", "place", "renew", "heartbeat")
# The verbs that a second time would do more: the next holder has the lock by then.
ONCE = ("force_release",)
_IN_DOUBT = "Whether it was done is not known: look at the lock before you do it again"


class Replicas(NamedTuple):
    """How many replicas must have a hold before it is valid, and within how many seconds."""

    needed: int = 0
    timeout: float = 1.0

    def checked(self) -> Replicas:
        """This object. Raises LockConfigError if the number cannot be used."""
        if type(self.needed) is not int or self.needed < 0:
            raise LockConfigError(
                f"min_replicas={self.needed!r} cannot be used. Use the number of replicas, 0 for "
                "none."
            )
        return self

    def wait(self, answer: float) -> Command:
        """The command that counts them, where `answer` seconds pass before one counts as lost."""
        seconds = min(self.timeout, answer / 2)
        return "WAIT", str(self.needed), str(max(round(seconds * 1000), 1))

    def check(self, script: Script, replies: Sequence[Any], copies: Any, effort: Effort) -> None:
        """Raise unless enough replicas have what a script promises. `copies` answered WAIT."""
        if not any(_promises(script, reply) for reply in replies):
            return
        if isinstance(copies, Exception):
            raise copies
        if copies < self.needed:
            effort.unheard += 1  # it was executed, but is not valid
            raise TooFewReplicas(f"{copies} of {self.needed} replicas within {self.timeout:g} s")


NONE = Replicas()


@dataclass(slots=True)
class Effort:
    """The time that a command can take, and the tries that it took.

    Attributes:
        within: seconds for each answer, if fewer than the connection's own timeout.
        once: whether to send the command once only, over a new connection, which cannot be stale.
        renewing: whether the keep-alive thread calls. Under gevent a socket belongs to its thread,
            so that thread has connections of its own.
        everywhere: whether all nodes of a cluster are asked, each for its own part.
        unheard: how many tries were not answered and can have been executed. A try that failed to
            connect was not executed; an error of the server is an answer.
        sent: when the last try was sent (`platform.clock`). A lease counts from then.
    """

    within: float | None = None
    once: bool = False
    renewing: bool = False
    everywhere: bool = False
    unheard: int = 0
    sent: float = 0.0


class Connections:
    """Connections to one server. A thread or greenlet uses a connection for one exchange. A forked
    child begins without connections, and never touches the sockets that it inherited.

    Args:
        kind: redis-py's class of connections.
        options: the keywords of that class.
        replicas: how many replicas must have a hold before it is valid.
        limit: seconds for a connect and for an answer, for the connections of the keep-alive
            thread and to Sentinels. Another thread opens these.
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
        self._pid = os.getpid()
        self._idle: deque[tuple[float, Any]] = deque()
        self._hangs = platform.native_lock()  # locked while a thread connects in vain
        self.replicas = replicas

    def call(
        self, script: Script, calls: Sequence[Call], effort: Effort, asking: bool = False
    ) -> list[Any]:
        """The outcome of each call of a script: its reply, with strings as bytes, or the error that
        the server answered. `asking`: the slot of the only call is moving to this node.

        Raises:
            RedisError, OSError: there is no answer, or too few replicas have the hold.
        """
        found: list[Any] = []
        for start in range(0, len(calls), IN_FLIGHT):
            part = calls[start : start + IN_FLIGHT]
            # ASKING is for the next command alone, so it must not be an EVALSHA that can fail.
            replies = self._send(script, part, effort, by_sha=not asking, asking=asking)
            if NoScriptError in map(type, replies):
                # EVAL, not SCRIPT LOAD, after which a failover could come. Repeating is harmless.
                replies = self._send(script, part, effort, by_sha=False, asking=False)
            found += replies
        return found

    def _send(
        self, script: Script, calls: Sequence[Call], effort: Effort, by_sha: bool, asking: bool
    ) -> list[Any]:
        how = ("EVALSHA", script.sha) if by_sha else ("EVAL", script.source)
        # As bytes: redis-py takes three times as long over a text, and a command has some fifteen.
        commands: list[Command | Encoded] = [
            tuple(map(str.encode, (*how, str(len(k)), *k, *args))) for k, args in calls
        ]
        if asking:
            commands.insert(0, ("ASKING",))
        if script.tells_first:
            # Redis writes to its clients in the reverse order in which their first answers came up
            # (networking.c, `clients_pending_write`). Without the PING the caller is the last to
            # whom it writes, so the first: beside the server, it would take the core from it, ask
            # again, and only then the next holder would hear of its grant (benchmarks/handover.py).
            commands.insert(0, ("PING",))
        ahead = len(commands) - len(calls)
        counts = self.replicas.needed and script.name in REPLICATED
        if counts:
            # WAIT counts the writes of its own connection, so it is sent along, and scripts write
            # whenever they promise anything.
            bound = min(filter(None, (effort.within, self._limit, self._options["socket_timeout"])))
            commands.append(self.replicas.wait(bound))
        answers = self.exchange(commands, effort)
        if asking and isinstance(answers[ahead - 1], Exception):
            return [answers[ahead - 1]]  # the node has then redirected the call once more
        replies = answers[ahead : ahead + len(calls)]
        if counts:
            self.replicas.check(script, replies, answers[-1], effort)
        return replies

    def exchange(self, commands: Sequence[Command | Encoded], effort: Effort) -> list[Any]:
        """Send commands together and read the answer to each. An error of the server is an answer.

        Raises:
            RedisError, OSError: a command was not answered.
        """
        within = effort.within
        while True:
            link, idle = (_open(self.make(within)), None) if effort.once else self._take(within)
            try:
                effort.sent = clock()
                link.send_packed_command(link.pack_commands(commands), check_health=False)
                answers = [_read(link, within) for _ in commands]
            except BaseException as error:
                # Also for a signal amid an answer: the next caller would read the rest of it.
                link.disconnect()
                note_address(error, link, heard=idle is not None)
                effort.unheard += not refused(error)
                if idle is None or not isinstance(error, FAULTS):
                    raise
                silent = isinstance(error, AnswerTimeout | TimeoutError)
                if silent and (effort.within or idle < FRESH):
                    raise
                # An idle connection can go stale, which says nothing about the server. All others
                # can be stale, too. A server that hangs must not cost as much again.
                within = BRIEF if silent else within
                self.close()
            else:
                for answer in answers:
                    if isinstance(answer, Exception) and demoted(answer):
                        # Behind a name or a proxy, a new connection leads to the new master.
                        link.disconnect()
                        self.close()
                        break
                else:
                    self._keep(link, idle is None, within)
                return answers

    def answers(self, *commands: Command) -> list[Any]:
        """As `exchange`, and raises a RelockError if a command was not answered."""
        try:
            return self.exchange(commands, Effort())
        except FAULTS as error:
            raise translate(error) from error

    def make(self, within: float | None = None, **address: Any) -> Any:
        """A new connection, outside of the list. It connects when it is used. `within`: seconds for
        its connect and each answer, if fewer than its own timeouts."""
        options = {**self._options, **address}
        if least := min(filter(None, (within, self._limit)), default=None):
            for name in ("socket_timeout", "socket_connect_timeout"):
                options[name] = min(options[name], least)
        return self._kind(**options)

    def fits(self, link: Any) -> bool:
        """Whether a connection leads to the server that commands must go to now."""
        return True

    def close(self, idle_for: float = 0.0, most: float = math.inf) -> None:
        """Close the connections that were idle for so many seconds, and of the other idle ones all
        but the `most` that were used last. Those in use stay open unless their exchange fails."""
        now, idle = clock(), self._idle
        try:
            while idle and (len(idle) > most or now - idle[0][0] >= idle_for):
                idle.popleft()[1].disconnect()
        except IndexError:  # another thread was faster
            return

    def _take(self, within: float | None) -> tuple[Any, float | None]:
        """A connection, and for how many seconds it was idle; None if it is new."""
        if self._pid != os.getpid():  # the idle connections are the parent's
            platform.notice_fork()
            self._idle, self._pid, self._hangs = deque(), os.getpid(), platform.native_lock()
        now, new = clock(), None
        while True:
            try:
                since, link = self._idle.pop()
            except IndexError:
                new = self.make(within)
                if self._limit and not platform.green():  # there a socket belongs to its thread
                    with suppress(platform.NoThread):
                        self._open_aside(new, min(within or self._limit, self._limit))
                        continue
                return _open(new), None
            if link is new:
                return link, None
            age = now - since
            if self.fits(link) and age < IDLE_FOR and (age < FRESH or _quiet(link)):
                return link, age
            link.disconnect()

    def _open_aside(self, link: Any, within: float) -> None:
        """Let a thread connect, and put the connection into the list, though it come late. Waits
        within a bound: the lookup of a name has none, nor has a credential provider. While one
        hangs, none follows. Raises as `_open` does; NoThread if there is none to spare."""
        bell, failed = platform.native_lock(), deque[BaseException]()
        bell.acquire()

        def connect() -> None:
            try:
                self._keep(_open(link), True, within)
            except BaseException as error:  # noqa: BLE001 - it is for who waits
                failed.append(error)
            finally:
                bell.release()

        if not (hangs := self._hangs.locked()):
            platform.start_native_thread(connect)
            if hangs := not bell.acquire(timeout=_LONGER * within):
                self._hangs = bell
        if hangs:
            raise _hanging(link)
        if failed:
            raise failed.pop()

    def _keep(self, link: Any, new: bool, within: float | None) -> None:
        if within and new and not self._limit:
            link.disconnect()  # its timeouts are too short for the next caller
            return
        self._idle.append((clock(), link))
        if len(self._idle) > 1:
            self.close(IDLE_FOR, MOST_IDLE)


def _open(link: Any) -> Any:
    """Connect a new connection. Raises RedisError, OSError."""
    try:
        link.connect()
    except BaseException as error:
        link.disconnect()
        note_address(error, link, heard=False)
        raise
    return link


def _hanging(link: Any) -> AnswerTimeout:
    error = AnswerTimeout("no connection in time: the lookup of the name, TLS or the login hangs")
    note_address(error, link, heard=False)
    return error


def _read(link: Any, within: float | None) -> Any:
    if within and not link.can_read(within):
        raise AnswerTimeout(f"no answer within {within:g} s")
    try:
        return link.read_response(disable_decoding=True)
    except ResponseError as error:
        return error.with_traceback(None)  # the traceback refers to the connection


def _array(reply: Any) -> Any:
    """A reply that is a line of words stands for the array of these, which redis-py reads more
    slowly (lua/README.md)."""
    return reply.split() if isinstance(reply, bytes) else reply


def _quiet(link: Any) -> bool:
    """Whether an idle connection has nothing to read. A closed one has: its end."""
    try:
        return not link.can_read(0)
    except FAULTS:  # whatever it is, the caller uses another connection
        return False


def _promises(script: Script, reply: Any) -> bool:
    if isinstance(reply, Exception):
        return False
    if script.name in ("acquire", "debounce", "place"):
        return _array(reply)[0] in (b"HELD", b"PARKED", b"PLACED")
    return any(
        line == 1 or (isinstance(line, bytes) and line.startswith(b"HELD")) for line in reply
    )


class Transport(ABC):
    """The way to all servers.

    Args:
        addresses: of the Redis. Two transports that have one in common lead to the same Redis.
        replicas: how many replicas must have a hold before it is valid.

    Attributes:
        fingerprint: equal for two transports with the same addresses, options and credentials.
        variant: of the scripts, see `scripts`.
        buckets: the number of buckets of its keys.
    """

    # Seconds for which a command is repeated before the server counts as unreachable.
    PATIENCE = 2.0
    # For AFTER seconds after that, callers wait BRIEF seconds for an answer: the release that
    # follows a failed acquire must not double the pause.
    AFTER = 1.0
    PAUSES = (0.0, 0.05, 0.1, 0.2)

    fingerprint = ""
    variant = "server"
    buckets = 1

    def __init__(self, addresses: Iterable[tuple[Any, ...]], replicas: Replicas) -> None:
        self.addresses = frozenset(addresses)
        self.replicas = replicas
        # When a server was last given up.
        self._gave_up: dict[object, float] = {}

    def run(
        self, script: Script, keys: Sequence[str], args: Sequence[str]
    ) -> tuple[Any, bool, float]:
        """Run one script.

        Returns:
            Its reply, with strings as bytes; whether it may have been executed more than once; and
            when the answered try was sent (`platform.clock`).

        Raises:
            LockUnavailable, LockConfigError: translated from redis-py's errors.
        """
        started, tries = clock(), 0
        server = self.route(bucket_of(keys[0])) if self.buckets > 1 else None
        brief = started - self._gave_up.get(server, -math.inf) < self.AFTER
        effort = Effort(BRIEF if brief else None, once=script.name in ONCE)
        while True:
            (outcome,) = self.run_each(script, [(keys, args)], effort)
            if not isinstance(outcome, Exception):
                return _array(outcome), effort.unheard > 0, effort.sent
            if effort.once and effort.unheard:
                raise LockUnavailable(f"{translate(outcome).reason}. {_IN_DOUBT}") from outcome
            again = passes(outcome)
            patience = self.patience(outcome) if again and not brief else 0.0
            if clock() - started >= patience:
                if again:
                    self._gave_up[server] = clock()
                raise translate(outcome) from outcome
            time.sleep(self.PAUSES[min(tries, len(self.PAUSES) - 1)])
            tries += 1

    def route(self, bucket: int) -> object:
        """The server of a bucket, if it is known."""
        return None

    def patience(self, error: Exception) -> float:
        """For how many seconds to repeat a command that failed with this error."""
        return self.PATIENCE

    @abstractmethod
    def run_each(self, script: Script, calls: Sequence[Call], effort: Effort) -> list[Any]:
        """The outcome of each call, a reply or an error. It is sent again only where an idle
        connection was stale."""

    @abstractmethod
    def at(self, key: str) -> Connections:
        """The connections to the server of a key. Raises a RelockError if no server is known."""

    @abstractmethod
    def masters(self, keys: Sequence[str] = ()) -> list[tuple[Connections, list[int]]]:
        """The connections to every server that has keys, and its buckets. Raises as `at` does.

        Args:
            keys: one of each bucket, if a server that a bucket has just left is not to be among
                them. A node tells which node serves which slot as far as it has heard.
        """

    @abstractmethod
    def listen(self, channel: Channel, listener: Listener) -> None:
        """Listen at an inbox; see `Backend.listen`. `channel` returns its name in a bucket."""


class SingleServer(Transport):
    """The way to one server.

    Args:
        work: connections for commands.
        renewals: connections for the keep-alive thread.
        address: of the server.
    """

    def __init__(self, work: Connections, renewals: Connections, address: tuple[Any, ...]) -> None:
        super().__init__([address], work.replicas)
        self._work = work
        self._renewals = renewals
        # How often a command found out that its server is a replica now.
        self._moves = 0

    def run_each(self, script: Script, calls: Sequence[Call], effort: Effort) -> list[Any]:
        links = self._renewals if effort.renewing else self._work
        try:
            found = links.call(script, calls, effort)
        except FAULTS as error:
            found = [error] * len(calls)
        for each in found:
            if isinstance(each, Exception) and demoted(each):
                self._moves += 1
        return found

    def at(self, key: str) -> Connections:
        return self._work

    def masters(self, keys: Sequence[str] = ()) -> list[tuple[Connections, list[int]]]:
        return [(self._work, [0])]

    def listen(self, channel: Channel, listener: Listener) -> None:
        moves = self._moves
        subscription = Subscription(self._work.make, [channel(0)])
        try:
            listener.ready()
            while moves == self._moves and self._work.fits(subscription.link):
                if not listener.wanted():
                    return
                if (notice := subscription.hear(STILL_WANTED)) is not None:
                    listener.hear(notice)
        finally:
            subscription.close()
        # A replica passes messages on, but the master does not know that somebody listens.
        raise LockUnavailable("the inbox's server is no longer the master")
