"""Where the master is that Sentinels name.

redis-py's own way keeps connections to the Sentinels, which neither native threads beside
greenlets nor forked children may share, and believes the first Sentinel that answers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import redis
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..errors import LockConfigError, RelockError

Address: TypeAlias = tuple[str, int]

# Seconds for all Sentinels together to say where the master is, where nobody asks for less.
BUDGET = 2.0
# How long the master's address is believed while its connections work, in seconds. After SENTINEL
# FAILOVER the old master takes writes for up to ten seconds more, and forgets them.
LOOK_EVERY = 2.0
_LOOK_WITHIN, _LOOK_LATER = 0.5, 10.0
# How long a Sentinel that was silent is not asked where another one knows.
_SHUN = 10.0
# A failover takes the time after which the Sentinels call a master down, and a few seconds more.
_FAILOVER, _LONGEST = 10.0, 60.0


class SentinelsAway(redis.ConnectionError):
    """No Sentinel answers."""


class MasterAway(redis.ConnectionError):
    """The Sentinels answer, and there is no master now."""


class Finder:
    """Asks Sentinels where the master of a service is.

    Each look is on connections of its own: the callers are native threads, greenlets and forked
    children. May be used by all of them at once.

    Args:
        service: the name that the Sentinels have for the master (`master_name`).
        hosts: the Sentinels.
        options: of redis-py, for the connections to the Sentinels (`sentinel_kwargs`).
        least: Sentinels that another one has to know of, to be believed (`min_other_sentinels`).
        patience: seconds for which a failover is waited for; None goes by the Sentinels' settings.
        manager: a redis-py `Sentinel` whose way to tell an address goes before this one's.

    Attributes:
        address: of the master, when it was last looked for; None before.

    Raises:
        LockConfigError: an option is none of redis-py's.
    """

    def __init__(
        self,
        service: str,
        hosts: Sequence[Address],
        options: Mapping[str, Any] | None = None,
        least: int = 0,
        patience: float | None = None,
        manager: redis.sentinel.Sentinel | None = None,
    ) -> None:
        self.service = service
        self.hosts = tuple(hosts)
        self.address: Address | None = None
        self._options = dict(options or {})
        self._least = least
        self._patience = patience
        self._down_after = 0.0
        self._looked = -LOOK_EVERY
        self._silent: dict[Address, float] = {}
        self._manager = manager
        try:
            self._client(self.hosts[0], 1.0).close()
        except (TypeError, ValueError, redis.RedisError) as error:
            raise LockConfigError(f"sentinel_kwargs cannot be used: {error}") from error

    @property
    def place(self) -> tuple[Any, ...]:
        """The service, whichever server is its master: the same in every process."""
        hosts = sorted(("127.0.0.1" if h == "localhost" else h, port) for h, port in self.hosts)
        return ("sentinel", self.service, tuple(hosts))

    def __repr__(self) -> str:
        # Tells two of them apart, and no password.
        way = type(self._manager), getattr(self._manager, "_force_master_ip", None)
        rest = repr((sorted(self._options.items()), self._least, self._patience, way))
        return f"Finder{self.place} {hashlib.sha256(rest.encode()).hexdigest()[:16]}"

    @property
    def patience(self) -> float:
        """Seconds for which it makes sense to repeat a command while a failover goes on."""
        if self._patience is not None:
            return self._patience
        return min(self._down_after + _FAILOVER, _LONGEST)

    def find(self, within: float = BUDGET) -> Address:
        """Ask for the master's address, for so many seconds at the most.

        Raises:
            SentinelsAway, MasterAway: as it is now.
            LockConfigError: the Sentinels do not know the service, or refuse to be asked.
        """
        self._looked = time.monotonic()
        if self._manager is not None and _has_own_way(self._manager):
            manager: Any = self._manager
            host, port = manager.discover_master(self.service)
            self.address = (host, port)
            return self.address
        states, failures, services = self._ask_all(within / len(self.hosts))
        best = max(states, key=_epoch, default=None)
        if best is not None:
            self._down_after = best["down-after-milliseconds"] / 1000
        if best is None or not self._usable(best):
            raise self._nobody(best, failures, services)
        host = getattr(self._manager, "_force_master_ip", None) or best["ip"]
        self.address = (host, best["port"])
        return self.address

    def look(self, now: float) -> None:
        """Look again if the last time is long ago; who does not answer changes nothing."""
        if now - self._looked >= LOOK_EVERY:
            try:
                self.find(_LOOK_WITHIN)
            except (redis.RedisError, OSError, RelockError):
                self._looked = now + _LOOK_LATER

    def _ask_all(
        self, each: float
    ) -> tuple[list[Mapping[str, Any]], dict[Address, Exception], set[str]]:
        """What the Sentinels say: more than half of them, where so many answer and agree with the
        latest. One that was cut off together with an old master still believes in that."""
        states: list[Mapping[str, Any]] = []
        failures: dict[Address, Exception] = {}
        services: set[str] = set()
        began, found = time.monotonic(), False
        # Who was silent comes last, and just after that only where nobody else knows.
        for host in sorted(self.hosts, key=lambda host: self._silent.get(host, 0.0)):
            if found and began - self._silent.get(host, -_SHUN) < _SHUN:
                break
            try:
                with self._client(host, max(each, 0.1)) as client:
                    masters = client.sentinel_masters()
            except (redis.RedisError, OSError) as error:
                failures[host] = error
                self._silent[host] = time.monotonic()
                continue
            self._silent.pop(host, None)
            services |= masters.keys()
            if self.service in masters:
                states.append(masters[self.service])
                found = self._usable(max(states, key=_epoch))
                if found and 2 * len(states) > len(self.hosts):
                    break
        return states, failures, services

    def _client(self, host: Address, timeout: float) -> redis.Redis:
        # No more than Celery's own clients send: a user of Sentinels may have few permissions.
        options = {"protocol": 2, **self._options}
        for name in ("socket_timeout", "socket_connect_timeout"):
            options[name] = min(options.get(name) or timeout, timeout)
        # redis-py 8 would try a Sentinel that is gone for seconds.
        return redis.Redis(host[0], host[1], **{**options, "retry": Retry(NoBackoff(), 0)})

    def _usable(self, state: Mapping[str, Any]) -> bool:
        down = state["is_sdown"] or state["is_odown"]
        return state["is_master"] and not down and state["num-other-sentinels"] >= self._least

    def _nobody(
        self,
        best: Mapping[str, Any] | None,
        failures: Mapping[Address, Exception],
        services: set[str],
    ) -> Exception:
        of = f"the master of {self.service!r}"
        said = "; ".join(f"{host}:{port}: {error}" for (host, port), error in failures.items())
        if best is not None and best["num-other-sentinels"] < self._least:
            return MasterAway(
                f"a Sentinel that knows {best['num-other-sentinels']} others is not believed about "
                f"{of}: min_other_sentinels is {self._least}"
            )
        if best is not None:
            return MasterAway(
                f"the Sentinels say that {of}, {best['ip']}:{best['port']}, is down: a failover is "
                "going on, or no replica can take over"
            )
        if services or len(failures) < len(self.hosts):
            text = (
                f"the Sentinels know no service {self.service!r}, but "
                f"{', '.join(map(repr, sorted(services))) or 'none at all'}: correct master_name"
            )
            return MasterAway(f"{text} ({said})") if failures else LockConfigError(text)
        if all(_is_refusal(error) for error in failures.values()):
            return LockConfigError(
                f"the Sentinels refuse to name {of}. Give their own password in sentinel_kwargs, "
                "as {'password': …} (that in the URL is the master's), and the port of the "
                f"Sentinels ({said})"
            )
        return SentinelsAway(f"no Sentinel answers that could name {of}: {said}")


def _has_own_way(manager: redis.sentinel.Sentinel) -> bool:
    return type(manager).discover_master is not redis.sentinel.Sentinel.discover_master


def _epoch(state: Mapping[str, Any]) -> int:
    return int(state.get("config-epoch", 0))


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, redis.ResponseError | redis.AuthenticationError)
