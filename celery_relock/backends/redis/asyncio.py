"""The backend in Redis for the coroutines of one event loop: the same scripts, keys and replies as
in `backend`, over connections of redis.asyncio.

redis-py's pools and clients are not used here either (see `connections`): if a task is cancelled
amid a command, they leave the answer in the connection for the next caller. Here one caller uses a
connection at a time, and the connection is closed unless every answer was read.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import redis
import redis.asyncio.cluster
import redis.asyncio.connection as connections
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ResponseError, TryAgainError
from redis.exceptions import TimeoutError as AnswerTimeout

from ...engine.protocol import (
    Answer,
    Claim,
    Downgraded,
    Held,
    LockState,
    Notice,
    Queued,
    Released,
    Renewal,
)
from ...errors import LockConfigError, LockUnavailable, RelockError
from .asyncio_cluster import Router, in_thread, listen
from .backend import (
    RedisBackend,
    accept_server,
    answer_to,
    downgraded,
    lock_state,
    place_of,
    released,
    reply_of,
)
from .cluster import Cluster, Node
from .connections import (
    FRESH,
    IN_FLIGHT,
    LOOK,
    PROMISES,
    Call,
    Command,
    Effort,
    Encoded,
    Replicas,
    commands_of,
)
from .errors import FAULTS, note_address, passes, translate, with_locks
from .keys import bucket_of
from .scripts import Script, scripts
from .sentinel import BUDGET, Watched
from .subscription import ASK, GIVE_UP, notice_of

# Commands on their way at the same time; others wait for their turn.
MOST = 8
_LIMIT = 1.0  # for a renewal, in seconds
# redis-py's class of connection for threads, and for coroutines.
_KINDS: Mapping[type[Any], type[Any]] = {
    redis.Connection: connections.Connection,
    redis.SSLConnection: connections.SSLConnection,
    redis.UnixDomainSocketConnection: connections.UnixDomainSocketConnection,
}


def kind_for_threads(kind: type[Any]) -> type[Any]:
    """The class of connection for threads that matches a class of redis.asyncio.

    Raises:
        LockConfigError: the class is not redis-py's own.
    """
    for threads, coroutines in _KINDS.items():
        if kind is coroutines:
            return threads
    raise LockConfigError(
        f"a lock cannot use connections of the class {kind.__qualname__}: give the URL of the Redis"
    )


class Links:
    """Connections to one server. A task uses a connection for one exchange.

    Args:
        make: returns a new connection, after at most the given seconds.
        fits: whether a connection leads to the server that commands must go to now.
        most: how many connections to use at a time.
        replicas: how many replicas must have a hold before it is valid.
        timeout: seconds for an exchange.
    """

    def __init__(
        self,
        make: Callable[[float | None], Awaitable[Any]],
        fits: Callable[[Any], Awaitable[bool]],
        most: int,
        replicas: Replicas,
        timeout: float,
    ) -> None:
        self.fits = fits
        self._make = make
        self._replicas = replicas
        self._timeout = timeout
        #: Whether idle connections can stay open.
        self.keeps = False
        # Every path that gets an entry puts one back, so a cancellation loses none.
        self._idle: asyncio.LifoQueue[tuple[float, Any]] = asyncio.LifoQueue()
        for _ in range(most):
            self._idle.put_nowait((0.0, None))

    async def call(
        self, script: Script, calls: Sequence[Call], effort: Effort, asking: bool = False
    ) -> list[Any]:
        """As `Connections.call`."""
        found: list[Any] = []
        for start in range(0, len(calls), IN_FLIGHT):
            part = calls[start : start + IN_FLIGHT]
            replies = await self._send(script, part, effort, by_sha=not asking, asking=asking)
            if NoScriptError in map(type, replies):
                replies = await self._send(script, part, effort, by_sha=False, asking=False)
            found += replies
        return found

    async def at(self, key: str) -> Links:
        """The connections to the server of a key."""
        return self

    async def _send(
        self, script: Script, calls: Sequence[Call], effort: Effort, by_sha: bool, asking: bool
    ) -> list[Any]:
        commands = commands_of(script, calls, by_sha, asking)
        ahead = len(commands) - len(calls)
        if not self._replicas.needed or script.name not in PROMISES:
            return (await self.ask(commands, effort))[ahead:]
        bound = min(effort.within or math.inf, self._timeout)
        *replies, copies = await self.ask([*commands, self._replicas.wait(bound)], effort)
        self._replicas.check(script, replies[ahead:], copies, effort)
        return replies[ahead:]

    async def ask(self, commands: Sequence[Command | Encoded], effort: Effort) -> list[Any]:
        """As `Connections.ask`."""
        since, link = await self._idle.get()
        try:
            while True:
                before, link = link, None
                link = await self._checked(before, time.monotonic() - since, effort.once)
                kept = link is not None
                try:
                    if not kept:
                        link = await self.connected(effort.within)
                    effort.unheard += 1
                    effort.sent = time.monotonic()
                    answers = await self._exchange(link, commands, effort.within)
                    effort.unheard -= 1
                except BaseException as error:
                    # Also for a cancellation: the next caller would read the rest of the answer.
                    await _close(link)
                    if link is not None:
                        note_address(error, link, heard=kept)
                    link = None
                    # An idle connection can go stale, which says nothing about the server.
                    if not kept or not isinstance(error, FAULTS):
                        raise
                    if isinstance(error, AnswerTimeout):
                        raise
                    await self.close()
                else:
                    if not self.keeps:
                        await _close(link)
                        link = None
                    return answers
        finally:
            self._idle.put_nowait((time.monotonic(), link))

    async def _checked(self, link: Any, idle: float, once: bool) -> Any:
        """The idle connection, if it is still usable; else None, and it is closed."""
        try:
            if link is not None and not once and await self._usable(link, idle):
                return link
        except BaseException:
            await _close(link)  # the answer to its PING can still come
            raise
        await _close(link)
        return None

    async def close(self) -> None:
        """Close the idle connections."""
        links = [self._idle.get_nowait()[1] for _ in range(self._idle.qsize())]
        for link in links:
            self._idle.put_nowait((0.0, None))
            await _close(link)

    async def connected(self, within: float | None = None) -> Any:
        """A new connection, outside of the list."""
        link = await self._make(within)
        try:
            await self._in_time(link, within, link.connect())
        except BaseException as error:
            await _close(link)
            note_address(error, link, heard=False)
            raise
        return link

    async def _exchange(
        self, link: Any, commands: Sequence[Command | Encoded], within: float | None
    ) -> list[Any]:
        async def exchange() -> list[Any]:
            await link.send_packed_command(link.pack_commands(commands), check_health=False)
            return [await _read(link) for _ in commands]

        answers: list[Any] = await self._in_time(link, within, exchange())
        return answers

    async def _in_time(self, link: Any, within: float | None, work: Awaitable[Any]) -> Any:
        """The result of some work on a connection. The connection is closed if that takes too long.

        The work is not cancelled. redis-py's own bound for each send, `asyncio.wait_for`, swallows
        a cancellation that comes just after the command was sent (before Python 3.12,
        https://github.com/python/cpython/issues/86296), and `async_timeout`, for Python 3.10,
        swallows a cancellation that coincides with the timeout.
        """
        seconds, closing = min(within or math.inf, self._timeout), []
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(seconds, lambda: closing.append(loop.create_task(_close(link))))
        late = f"no answer within {seconds:g} s"
        try:
            found = await work
        except FAULTS as error:
            if closing:
                raise AnswerTimeout(late) from error
            raise
        finally:
            alarm.cancel()
        if closing:
            raise AnswerTimeout(late)
        return found

    async def _usable(self, link: Any, idle: float) -> bool:
        """Whether an idle connection still works. If a command found out that it does not, nobody
        could tell whether the command was executed."""
        if not await self.fits(link):
            return False
        if idle < FRESH:
            return True
        try:
            return await self._exchange(link, [("PING",)], _LIMIT) == [b"PONG"]
        except FAULTS:
            return False


async def _close(link: Any) -> None:
    if link is not None:
        with suppress(*FAULTS):
            await link.disconnect(nowait=True)


async def _read(link: Any) -> Any:
    try:
        return await link.read_response(disable_decoding=True)
    except ResponseError as error:
        return error.with_traceback(None)  # the traceback refers to the connection


class CoroutineBackend:
    """The verbs of a `RedisBackend` that a `Lock` needs, for one event loop.

    Args:
        same: the backend with the same locks.
    """

    def __init__(self, same: RedisBackend) -> None:
        self.same = same
        self.replicated = same.replicated
        self._transport = transport = same.transport
        cluster = transport if isinstance(transport, Cluster) else None
        kind, options = cluster.made if cluster else transport.masters()[0].made_of
        self._kind = _KINDS[kind]
        self._options = {**options, "retry": Retry(NoBackoff(), 0), "socket_timeout": None}
        if self._options.pop("parser_class", None):  # before redis-py 8, in a cluster
            self._options["parser_class"] = redis.asyncio.cluster.ClusterParser  # type: ignore[attr-defined]
        seconds = float(options["socket_timeout"])
        self._work = self._links(MOST, seconds)
        # Renewals must not wait behind other commands.
        self._renewals = self._links(1, min(seconds, _LIMIT))
        self._scripts = scripts(transport.variant)
        self._agreed: set[str] = set()
        self._gave_up_at = -math.inf

    def keep(self, keeps: bool) -> None:
        """Set whether idle connections stay open. They can only while somebody will close them."""
        self._work.keeps = self._renewals.keeps = keeps

    async def close(self) -> None:
        """Close the idle connections. The backend can still be used."""
        await self._work.close()
        await self._renewals.close()

    async def acquire(self, claim: Claim, waiter_lease: float = 0.0, inbox: str = "-") -> Answer:
        called = self.same.acquire_call(claim, waiter_lease, inbox)
        return answer_to(claim, *await self._run("acquire", *called, claim.names))

    async def release(
        self,
        names: Sequence[str],
        execution_id: str,
        attempt_id: str,
        ended: str = "",
        remember: float = 0.0,
        *,
        waited: bool = False,
    ) -> Released:
        called = self.same.release_call(names, execution_id, attempt_id, ended, remember)
        reply, repeated, _ = await self._run("release", *called, names, tells_first=waited)
        return released(reply, repeated)

    async def renew(
        self, renewals: Sequence[Renewal], *, within: float | None = None, once: bool = False
    ) -> list[bool]:
        try:
            found = await self._in_batches("renew", renewals, self.same.renew_call, within, once)
        except RelockError as error:
            names = [each.name for each in renewals]
            raise with_locks(error, "renew", names) from error.__cause__
        return [kept == 1 for kept in found]

    async def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        found = await self._in_batches("heartbeat", renewals, self.same.heartbeat_call, within)
        return [place_of(line) for line in found]

    async def downgrade(
        self, names: Sequence[str], execution_id: str, attempt_id: str
    ) -> Downgraded:
        called = self.same.downgrade_call(names, execution_id, attempt_id)
        return downgraded(names, *(await self._run("downgrade", *called, names))[:2])

    async def inspect(self, name: str) -> LockState:
        reply, *_ = await self._run("inspect", *self.same.inspect_call(name), (name,))
        return lock_state(reply)

    async def listen(
        self, inbox: str, ready: Callable[[], None], hear: Callable[[Notice], None]
    ) -> None:
        """Listen at an inbox for ever, as `Backend.listen` does."""
        link = None
        try:
            if isinstance(self._work, Router):
                await listen(self.same.listen, inbox, ready, hear)
                return
            link = await self._work.connected()
            await link.send_command("SUBSCRIBE", self.same.keys.inbox(inbox), check_health=False)
            heard = asked = time.monotonic()
            while await self._work.fits(link):
                word = await link.read_response(disable_decoding=True, timeout=LOOK)
                now = time.monotonic()
                if word is not None:
                    heard = asked = now
                    if word[0] == b"subscribe":
                        ready()
                    elif word[0] == b"message" and word[2] and (notice := notice_of(word[2])):
                        hear(notice)
                elif now - heard > GIVE_UP:
                    raise LockUnavailable("the inbox's connection no longer answers")
                elif now - asked > ASK:
                    asked = now
                    await link.send_command("PING", check_health=False)
        except FAULTS as error:
            raise translate(error) from error
        finally:
            await _close(link)
        raise LockUnavailable("the inbox's server is no longer the master")

    async def _run(
        self,
        verb: str,
        keys: Sequence[str],
        args: Sequence[str],
        names: Sequence[str] = (),
        tells_first: bool = False,
    ) -> tuple[Any, bool, float]:
        """As `Transport.run`. Before the first command, check the layout."""
        meta = self.same.keys.meta(bucket_of(keys[0]))
        try:
            if meta not in self._agreed:
                await self._agree(meta)
            script = self._scripts[verb]._replace(tells_first=tells_first)
            return await self._repeated(script, (keys, args))
        except RelockError as error:
            raise with_locks(error, verb, names) from error.__cause__

    async def _repeated(self, script: Script, call: Call) -> tuple[Any, bool, float]:
        way, started, tries = self._transport, time.monotonic(), 0
        brief = started - self._gave_up_at < way.AFTER
        effort = Effort(way.BRIEF if brief else None)
        while True:
            try:
                (reply,) = await self._work.call(script, [call], effort)
                if not isinstance(reply, Exception):
                    return reply, effort.unheard > 0, effort.sent
                raise reply
            except FAULTS as error:
                again = passes(error)
                # In a thread, because it can ask the cluster's nodes.
                worth = again and not brief
                patience = await in_thread(way.patience, error) if worth else 0.0
                if time.monotonic() - started >= patience:
                    if again:
                        self._gave_up_at = time.monotonic()
                    raise translate(error) from error
            await asyncio.sleep(way.PAUSES[min(tries, len(way.PAUSES) - 1)])
            tries += 1

    async def _agree(self, meta: str) -> None:
        """As `RedisBackend._agree`."""
        for each in {self.same.keys.meta(), meta} - self._agreed:
            reply, *_ = await self._repeated(self._scripts["open"], self.same.open_call(each))
            self.same.check_layout(reply)
            if not self._agreed:
                await self._look_at_server(each)
            self._agreed.add(each)

    async def _look_at_server(self, key: str) -> None:
        try:
            links = await self._work.at(key)
            accept_server(*await links.ask(self.same.look_at_server, Effort()))
        except FAULTS as error:
            raise translate(error) from error

    async def _in_batches(
        self,
        verb: str,
        renewals: Sequence[Renewal],
        called: Callable[[Sequence[Renewal]], Call],
        within: float | None,
        once: bool = False,
    ) -> list[Any]:
        script, found = self._scripts[verb], [None] * len(renewals)
        links = self._work if once else self._renewals

        async def outcomes(parts: Sequence[Sequence[int]]) -> list[Any]:
            calls = [called([renewals[index] for index in part]) for part in parts]
            if within is None:
                return [(await self._run(verb, *each))[0] for each in calls]
            try:
                return await links.call(script, calls, Effort(within, once))
            except FAULTS as error:
                raise translate(error) from error

        parts = self.same.parts(renewals)
        for part, outcome in zip(parts, await outcomes(parts), strict=True):
            lines = outcome
            if isinstance(outcome, TryAgainError) and verb == "renew":
                # While a slot moves, its keys are at two nodes, so each key needs its own call.
                single = await outcomes([[index] for index in part])
                lines = [reply_of(each)[0] for each in single]
            for index, line in zip(part, reply_of(lines), strict=True):
                found[index] = line
        return found

    def _links(self, most: int, seconds: float) -> Links | Router:
        async def made(within: float | None = None, **address: Any) -> Any:
            try:
                return self._kind(**{**self._options, **address})
            except TypeError as error:  # redis.asyncio lacks an option of connections for threads
                raise LockConfigError(
                    f"redis.asyncio does not take these options: {error}"
                ) from error

        transport, replicas = self._transport, self._transport.replicas
        if isinstance(transport, Cluster):

            def links_to(node: Node) -> Links:
                at = partial(made, host=node.host, port=node.port)
                return Links(at, _always, most, replicas, seconds)

            return Router(transport, links_to)
        if not isinstance(transport, Watched):
            return Links(made, _always, most, replicas, seconds)
        finder = transport.finder

        # The Sentinels are asked over connections for threads, so in a thread.
        async def at_master(within: float | None) -> Any:
            host, port = await in_thread(finder.find, within or BUDGET)
            return await made(host=host, port=port)

        async def is_at_master(link: Any) -> bool:
            if finder.is_due():
                await in_thread(finder.look)
            return bool((link.host, link.port) == finder.address)

        return Links(at_master, is_at_master, most, replicas, seconds)


async def _always(link: Any) -> bool:
    return True
