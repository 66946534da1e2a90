"""Connections to the master that Sentinels name, wherever it moves.

redis-py's own pool gives answers to the wrong caller when a signal strikes, and it believes the
first Sentinel that answers, even if that Sentinel was cut off together with an old master.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import redis
from redis.sentinel import Sentinel

from ...engine.platform import green
from ...errors import LockConfigError, RelockError
from .connections import Connections, Effort, SingleServer
from .errors import FAULTS

Address: TypeAlias = "tuple[str, int]"

# Seconds for all Sentinels together to say where the master is.
BUDGET = 2.0
# Seconds for which the master's address is believed while its connections work. After SENTINEL
# FAILOVER the old master accepts writes for up to ten seconds, and loses them.
LOOK_EVERY = 2.0
_LOOK_WITHIN, _LOOK_LATER = 0.5, 10.0
# Seconds for which a silent Sentinel is not asked if another Sentinel knows the master.
_SHUN = 10.0
# In seconds: what a failover takes after the Sentinels have declared a master down; and the most
# that is waited for it in all.
_FAILOVER, _LONGEST = 10.0, 60.0


class SentinelsAway(redis.ConnectionError):
    """No Sentinel answers."""


class Vote(NamedTuple):
    """What a Sentinel answers. The greatest vote counts: the latest epoch's, and within an epoch
    that of the Sentinel that leads the failover. It answers the new address while its own state
    still has the old one for seconds (`moved`)."""

    epoch: int
    moved: bool
    address: Address
    usable: bool


class Finder:
    """Asks Sentinels where the master of a service is, over connections that are kept: over TLS a
    new one takes 15 ms of processor time.

    Args:
        service: the Sentinels' name for the master (`master_name`).
        ways: by the address of each Sentinel, redis-py's class of connection and its keywords.
        least: how many other Sentinels a Sentinel must know to be believed
            (`min_other_sentinels`).
        patience: for how many seconds to wait for a failover; None goes by the Sentinels' settings.
        manager: a redis-py `Sentinel` with its own way to find the address.

    Attributes:
        address: the master's address at the last look; None before the first.
        hosts: the addresses of the Sentinels.
    """

    def __init__(
        self,
        service: str,
        ways: Mapping[Address, tuple[type[Any], Mapping[str, Any]]],
        least: int,
        patience: float | None = None,
        manager: Sentinel | None = None,
    ) -> None:
        self.service = service
        self.address: Address | None = None
        self.hosts = tuple(ways)
        self._ways = ways
        self._least = least
        self._patience = patience
        self._manager = manager
        self._down_after = 0.0
        self._looked = -LOOK_EVERY
        self._failed = 0
        self._silent: dict[Address, float] = {}
        self._links = {host: self._to(host) for host in ways}

    @property
    def patience(self) -> float:
        """For how many seconds to repeat a command during a failover."""
        if self._patience is not None:
            return self._patience
        return min(self._down_after + _FAILOVER, _LONGEST)

    def find(self, within: float = BUDGET) -> Address:
        """Ask for the master's address, for about `within` seconds at most.

        Raises:
            SentinelsAway: no Sentinel answers.
            ConnectionError: there is no master now, as the Sentinels answer.
            LockConfigError: the Sentinels do not know the service, or refuse to answer.
        """
        self._looked = time.monotonic()
        self._failed += 1  # until there is an answer
        if self._manager is not None:
            manager: Any = self._manager
            host, port = manager.discover_master(self.service)
            self.address, self._failed = (host, int(port)), 0
            return self.address
        votes, failures, services = self._ask_all(max(within / len(self.hosts), 0.1))
        usable = [vote for vote in votes if vote.usable]
        if not usable:
            raise self._nobody(votes, failures, services)
        self.address, self._failed = max(usable).address, 0
        return self.address

    def look(self) -> None:
        """Find the master again if the last look is long ago. A failure leaves the address."""
        # A look in vain can cost a command half a second. At first it is soon made up for, as the
        # Sentinels are slow while they have a failover.
        pause = min(2.0 ** min(self._failed, 4), _LOOK_LATER) if self._failed else LOOK_EVERY
        if time.monotonic() - self._looked >= pause:
            with suppress(*FAULTS, RelockError):
                self.find(_LOOK_WITHIN)

    def _ask_all(self, each: float) -> tuple[list[Vote], dict[Address, Exception], set[str]]:
        """The votes of the Sentinels, until more than half have a usable one: a single Sentinel can
        believe in an old master. With their failures, and the services that they know."""
        votes: list[Vote] = []
        failures: dict[Address, Exception] = {}
        services: set[str] = set()
        began = time.monotonic()
        # Silent Sentinels come last, and recently silent ones only if no other one knows.
        for host in sorted(self.hosts, key=lambda host: self._silent.get(host, 0.0)):
            usable = sum(vote.usable for vote in votes)
            shunned = began - self._silent.get(host, -_SHUN) < _SHUN
            if 2 * usable > len(self.hosts) or (usable and shunned):
                break
            try:
                masters, there = self._said_by(host, each)
                services |= masters.keys()
                if self.service in masters:
                    votes.append(self._vote(masters[self.service], there))
                self._silent.pop(host, None)
            except FAULTS as error:
                failures[host] = error
                self._silent[host] = time.monotonic()
        return votes, failures, services

    def _said_by(self, host: Address, within: float) -> tuple[dict[str, dict[bytes, bytes]], Any]:
        """What a Sentinel says of each service, and the address that it tells for ours."""
        # Under gevent a socket belongs to its thread, and the keep-alive thread looks, too.
        links = self._to(host) if (alone := green()) else self._links[host]
        address = "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service
        states, there = links.exchange([("SENTINEL", "MASTERS"), address], Effort(within))
        if alone:
            links.close()
        for answer in (states, there):
            if isinstance(answer, Exception):
                raise answer
        masters = [dict(zip(state[::2], state[1::2], strict=True)) for state in states]
        return {state[b"name"].decode(): state for state in masters}, there

    def _vote(self, state: Mapping[bytes, bytes], there: Any) -> Vote:
        self._down_after = int(state[b"down-after-milliseconds"]) / 1000
        own = state[b"ip"].decode(), int(state[b"port"])
        address = (there[0].decode(), int(there[1])) if there else own
        flags = set(state[b"flags"].split(b","))
        up = b"master" in flags and flags.isdisjoint((b"s_down", b"o_down"))
        usable = int(state[b"num-other-sentinels"]) >= self._least and (address != own or up)
        return Vote(int(state.get(b"config-epoch", 0)), address != own, address, usable)

    def _to(self, host: Address) -> Connections:
        return Connections(*self._ways[host], limit=BUDGET)

    def _nobody(
        self, votes: Sequence[Vote], failures: Mapping[Address, Exception], services: set[str]
    ) -> Exception:
        of = f"the master of {self.service!r}"
        said = "; ".join(f"{host}:{port}: {error}" for (host, port), error in failures.items())
        if votes:
            host, port = max(votes).address
            return redis.ConnectionError(
                f"the Sentinels say that {of}, {host}:{port}, is down: a failover is going on, or "
                f"no replica can take over; or each of them knows fewer other Sentinels than "
                f"min_other_sentinels={self._least}"
            )
        if services or not failures:
            text = (
                f"the Sentinels know no service {self.service!r}, but "
                f"{', '.join(map(repr, sorted(services))) or 'none at all'}: correct master_name"
            )
            return redis.ConnectionError(f"{text} ({said})") if failures else LockConfigError(text)
        refusals = redis.ResponseError, redis.AuthenticationError
        if all(isinstance(error, refusals) for error in failures.values()):
            return LockConfigError(
                f"the Sentinels refuse to name {of}. Give their password in sentinel_kwargs, as "
                "{'password': …} (the URL has the master's password), and the port of the "
                "Sentinels. Their user needs +sentinel|masters and "
                f"+sentinel|get-master-addr-by-name ({said})"
            )
        return SentinelsAway(f"no Sentinel answers that could name {of}: {said}")


class ToMaster(Connections):
    """Connections to the server that is the master when they are made. Connections to the previous
    master are dropped."""

    def __init__(self, finder: Finder, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._finder = finder

    def make(self, within: float | None = None, **_: Any) -> Any:
        host, port = self._finder.find(within or BUDGET)
        return super().make(within, host=host, port=port)

    def fits(self, link: Any) -> bool:
        self._finder.look()
        return (link.host, link.port) == self._finder.address


class Watched(SingleServer):
    """The way to the master that Sentinels name. A command is repeated for as long as a failover
    takes."""

    def __init__(self, finder: Finder, *args: Any) -> None:
        super().__init__(*args)
        self.finder = finder

    def patience(self, error: Exception) -> float:
        # Without a Sentinel nobody can tell about a failover, so do not wait for it.
        if isinstance(error, SentinelsAway):
            return min(self.PATIENCE, self.finder.patience)
        return self.finder.patience
