"""The way of coroutines to the masters of a cluster. It uses the map of `cluster`, which asks the
nodes in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from redis.exceptions import AskError, MovedError

from ...engine.platform import start_native_thread
from ...engine.protocol import Notice
from .cluster import BRIEFLY, HOPS, Cluster, Node, circle, whole
from .connections import Call, Effort
from .errors import FAULTS
from .keys import bucket_of
from .scripts import Script

if TYPE_CHECKING:
    from .asyncio import Links

_T = TypeVar("_T")


class Router:
    """The connections to all masters of a cluster, with the interface of `Links`.

    Args:
        cluster: knows the master of each bucket.
        links_to: returns the connections to a node.
    """

    def __init__(self, cluster: Cluster, links_to: Callable[[Node], Links]) -> None:
        self._map = cluster.map
        self._links_to = links_to
        self._nodes: dict[Node, Links] = {}
        self._keeps = False

    @property
    def keeps(self) -> bool:
        return self._keeps

    @keeps.setter
    def keeps(self, keeps: bool) -> None:
        self._keeps = keeps
        for links in self._nodes.values():
            links.keeps = keeps

    async def call(self, script: Script, calls: Sequence[Call], effort: Effort) -> list[Any]:
        """The outcome of each call at its master: a reply or an error, even if no node answered."""
        there: dict[Node, list[int]] = {}
        outcomes: list[Any] = [None] * len(calls)
        calls = [(whole(script, keys), args) for keys, args in calls]
        for index, (keys, _) in enumerate(calls):
            try:
                there.setdefault(await self._serving(keys[0]), []).append(index)
            except FAULTS as error:
                outcomes[index] = error
        for node, indexes in there.items():
            try:
                part = [calls[index] for index in indexes]
                replies = await self._at(node).call(script, part, effort)
            except FAULTS as error:
                self._map.silent(node)
                if effort.within is not None:  # for the next call: this one is not repeated
                    with suppress(*FAULTS):
                        await in_thread(self._map.look, min(effort.within, BRIEFLY))
                replies = [error] * len(indexes)
            for index, reply in zip(indexes, replies, strict=True):
                outcomes[index] = await self._followed(script, calls[index], effort, node, reply)
        return outcomes

    async def at(self, key: str) -> Links:
        """The connections to the server of a key. Raises RedisError if no server is known."""
        return self._at(await self._serving(key))

    async def close(self) -> None:
        """Close the idle connections."""
        for links in list(self._nodes.values()):
            await links.close()

    def _at(self, node: Node) -> Links:
        if node not in self._nodes:
            self._nodes[node] = self._links_to(node)
            self._nodes[node].keeps = self._keeps
        return self._nodes[node]

    async def _serving(self, key: str) -> Node:
        bucket = bucket_of(key)
        known = self._map.known(bucket)
        return await in_thread(self._map.serving, bucket) if known is None else known

    async def _followed(
        self, script: Script, call: Call, effort: Effort, node: Node, said: Any
    ) -> Any:
        """The outcome of a call that a node has answered, after any redirections."""
        for _ in range(HOPS):
            if not isinstance(said, MovedError | AskError):
                return said
            node, asking = self._map.told(bucket_of(call[0][0]), node, said), type(said) is AskError
            try:
                (said,) = await self._at(node).call(script, [call], effort, asking)
            except FAULTS as error:
                return error
        return circle(said) if isinstance(said, MovedError | AskError) else said


async def listen(
    hear_inbox: Callable[..., None],
    inbox: str,
    ready: Callable[[], None],
    hear: Callable[[Notice], None],
) -> None:
    """Listen at an inbox by means of threads, one for each master.

    Args:
        hear_inbox: `Backend.listen`.
    """
    loop, wanted = asyncio.get_running_loop(), True

    def tell(what: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, and its leases are released
            loop.call_soon_threadsafe(what, *args)

    told = partial(tell, ready), partial(tell, hear)
    try:
        await in_thread(hear_inbox, inbox, *told, lambda: wanted)
    finally:
        wanted = False


async def in_thread(work: Callable[..., _T], *args: Any) -> _T:
    """Do some work in a new thread, and return its result. The loop's own threads can all be busy
    for longer than a lease."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        outcome: tuple[Any, Exception | None]
        try:
            outcome = work(*args), None
        except Exception as error:  # noqa: BLE001 - raised where the work is awaited
            outcome = None, error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    start_native_thread(run)
    return await done
