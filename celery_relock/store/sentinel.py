"""Connections to the master that Sentinels name, wherever it moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
from redis.sentinel import SentinelConnectionPool

from ..errors import LockConfigError
from .connection import PATIENCE, Connections
from .finder import BUDGET, Address, Finder, SentinelsAway


class _ToMaster:
    """A connection that goes to whichever server is the master when it is made."""

    def __init__(self, *, finder: Finder, **options: Any) -> None:
        super().__init__(**options)
        self.finder = finder

    def _connect(self) -> Any:
        # Here, and not in `connect`: redis-py 8 has ways round that.
        link: Any = self
        link.host, link.port = self.finder.find(link.socket_connect_timeout or BUDGET)
        opened: Callable[[], Any] = super()._connect  # type: ignore[misc]
        return opened()


class MasterConnection(_ToMaster, redis.Connection):
    """To the master, in the clear."""


class SecureMasterConnection(_ToMaster, redis.SSLConnection):
    """To the master, by TLS."""


# How the transport options, or the query of a URL, say what is asked of the Sentinels.
FOUND_BY = ("master_name", "min_other_sentinels", "patience")


def by_sentinels(
    hosts: Sequence[Address], given: Mapping[str, Any], options: Mapping[str, Any], shown: str
) -> dict[str, Any]:
    """Options for connections to the master that the Sentinels of a URL name.

    Args:
        given: transport options.
        options: those of the connection so far.
        shown: the URL, for messages.

    Raises:
        LockConfigError: there is no master's name among the options, or one cannot be used.
    """
    service, login = given.get("master_name"), given.get("sentinel_kwargs") or {}
    if not service or not isinstance(service, str):
        raise LockConfigError(
            f"{shown} needs the name that the Sentinels have for the master: write ?master_name=… "
            "behind it, or set relock_transport_options = {'master_name': …}; where it is the URL "
            "of the broker or the result backend, set it in their transport options"
        )
    if not isinstance(login, Mapping):
        raise LockConfigError(
            f"{shown}: sentinel_kwargs must be a dict, not {type(login).__name__}"
        )
    try:
        least = int(given.get("min_other_sentinels") or 0)
        patience = None if given.get("patience") is None else float(given["patience"])
        if least < 0 or (patience or 0) < 0:
            raise ValueError
    except (TypeError, ValueError):
        raise LockConfigError(
            f"{shown}: min_other_sentinels and patience (seconds) are numbers from 0 on"
        ) from None
    secure = issubclass(options["connection_class"], redis.SSLConnection)
    return {
        "connection_class": SecureMasterConnection if secure else MasterConnection,
        "finder": Finder(service, hosts, login, least, patience),
    }


def to_master(pool: SentinelConnectionPool) -> dict[str, Any]:
    """Options for connections to the master that a pool of redis-py's finds by Sentinels.

    Raises:
        LockConfigError: the pool leads to replicas.
    """
    if not pool.is_master:
        raise LockConfigError(
            f"the client for {pool.service_name!r} leads to its replicas, where nothing can be "
            "locked: make it with Sentinel.master_for"
        )
    manager = pool.sentinel_manager
    clients = [client.connection_pool.connection_kwargs for client in manager.sentinels]
    hosts = [(each.get("host", "localhost"), each.get("port", 26379)) for each in clients]
    finder = Finder(
        pool.service_name,
        hosts,
        manager.sentinel_kwargs,
        manager.min_other_sentinels,
        manager=manager,
    )
    secure = issubclass(pool.connection_class, redis.SSLConnection)
    return {
        "connection_class": SecureMasterConnection if secure else MasterConnection,
        "finder": finder,
    }


class Following(Connections):
    """As `Connections`, to a master that moves: kept connections to the one before are dropped, and
    a command is repeated for as long as a failover takes."""

    def __init__(self, pool: redis.ConnectionPool, *args: Any, **options: Any) -> None:
        super().__init__(pool, *args, **options)
        self._finder: Finder = pool.connection_kwargs["finder"]

    def _take(self, now: float) -> tuple[Any, bool]:
        if self._idle:
            self._finder.look(now)
        while True:
            link, kept = super()._take(now)
            if not kept or (link.host, link.port) == self._finder.address:
                return link, kept
            link.disconnect()

    def _terms(self, now: float, within: float | None) -> tuple[float, float | None, bool]:
        patience, within, brief = super()._terms(now, within)
        return patience and self._finder.patience, within, brief

    def _over(self, error: Exception, since: float, patience: float) -> bool:
        # Where nobody tells of a failover, none is waited for.
        limit = min(patience, PATIENCE) if isinstance(error, SentinelsAway) else patience
        return super()._over(error, since, limit)
