"""What can be wrong with the servers of the locks. The doctor tells all of it, and a worker at its
start what can lose parked messages or stops every lock."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from .inspection import Server

ERROR, WARNING, NOTICE = SEVERITIES = ("error", "warning", "notice")

# Above these there is a finding: seconds of a usual and of the longest round trip, seconds between
# two clocks; the used share of memory or connections.
_SLOW, _VERY_SLOW, _APART, _FULL = 0.02, 1.0, 1.0, 0.9


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that hurts, or will.

    Attributes:
        check: what was looked at, a word for programs.
        severity: "error", locks do not work, or parked tasks can be lost; "warning", it will hurt
            one day; "notice", good to know.
        what: what is wrong, a sentence.
        why: why it matters.
        do: what to do about it.
    """

    check: str
    severity: str
    what: str
    why: str
    do: str


def _version(server: Server) -> Iterator[Finding]:
    version = server.info.get("redis_version", "")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < (6, 2):
        yield Finding(
            "version",
            ERROR,
            f"the server is Redis {version}",
            "It lacks commands that locks need.",
            "Use Redis 6.2 or newer, or Valkey.",
        )


def _role(server: Server) -> Iterator[Finding]:
    if server.info.get("role") == "slave":
        yield Finding(
            "role",
            ERROR,
            "relock_url leads to a replica",
            "A replica accepts no writes, so no lock can be acquired.",
            "Set relock_url to the master, or to the Sentinels.",
        )


def _eviction(server: Server) -> Iterator[Finding]:
    policy = server.info.get("maxmemory_policy", "noeviction")
    bounded = server.info.get("maxmemory", "0") != "0"
    # What is parked has no time to live, which a policy "volatile-…" looks for.
    parked = "" if policy.startswith("volatile-") else ", and parked tasks"
    if policy != "noeviction":
        yield Finding(
            "eviction",
            ERROR if bounded else WARNING,
            f"maxmemory-policy is {policy}"
            + ("" if bounded else ", though maxmemory is not set so far"),
            f"When its memory is full, Redis deletes locks that are held{parked}.",
            "Set maxmemory-policy noeviction, by CONFIG SET and in redis.conf. A cache needs a "
            "Redis of its own.",
        )


def _full(server: Server) -> Iterator[Finding]:
    most, used = (int(server.info.get(name, 0)) for name in ("maxmemory", "used_memory"))
    if most and used > _FULL * most:
        yield Finding(
            "memory",
            ERROR if used >= most else WARNING,
            f"{used * 100 // most} % of maxmemory ({most // 2**20} MB) are in use",
            "When the memory is full, no lock can be acquired, and no task can be parked.",
            "Raise maxmemory, or see below which keys use the memory.",
        )


def _persistence(server: Server) -> Iterator[Finding]:
    if server.info.get("aof_enabled") == "0" and server.saves == "":
        yield Finding(
            "persistence",
            WARNING,
            "the server keeps nothing on disk",
            "Parked tasks are lost when the server restarts: their messages are nowhere else.",
            "Turn appendonly on, or use lock_on_conflict='retry', which leaves messages to the "
            "broker.",
        )
    for name, what in (("rdb_last_bgsave_status", "save"), ("aof_last_write_status", "append")):
        if server.info.get(name, "ok") != "ok":
            yield Finding(
                "persistence",
                ERROR,
                f"the server could not {what} to its disk ({name} is not ok)",
                "By default it then accepts no writes, so no lock can be acquired.",
                "Read its log: the disk is full, or the server cannot write to its folder.",
            )


def _clock(server: Server) -> Iterator[Finding]:
    ahead, about = server.clock
    if abs(ahead) - about > _APART:
        side = "ahead of" if ahead > 0 else "behind"
        yield Finding(
            "clock",
            WARNING,
            f"the server's clock is {abs(ahead):.1f} s {side} this machine's",
            "Locks go by the server's clock alone. But displayed times, lock_max_wait of parked "
            "tasks and the countdowns of retries go by both clocks.",
            "Keep both clocks right with NTP.",
        )


def _latency(server: Server) -> Iterator[Finding]:
    if not server.trips:
        return
    usual, longest = median(server.trips), server.trips[-1]
    if usual > _SLOW or longest > _VERY_SLOW:
        yield Finding(
            "latency",
            WARNING,
            f"a round trip takes {usual * 1000:.0f} ms, the longest of {len(server.trips)} took "
            f"{longest * 1000:.0f} ms",
            "An uncontended lock costs two round trips, and a renewal must succeed within two "
            "thirds of lock_ttl.",
            "Move Redis closer to the workers; see SLOWLOG and LATENCY DOCTOR.",
        )


def _connections(server: Server) -> Iterator[Finding]:
    used, most = (int(server.info.get(name, 0)) for name in ("connected_clients", "maxclients"))
    if most and used > _FULL * most:
        yield Finding(
            "connections",
            WARNING,
            f"{used} of {most} connections (maxclients) are in use",
            "Without a free connection, no lock can be acquired.",
            "Raise maxclients. A worker process needs three connections.",
        )


def _replicas(server: Server) -> Iterator[Finding]:
    there = int(server.info.get("connected_slaves", server.needed))
    if there < server.needed:
        yield Finding(
            "replicas",
            ERROR,
            f"the server has {there} replicas, and relock_min_replicas is {server.needed}",
            "Until it has enough replicas, no lock can be acquired.",
            "Bring the replicas back, or lower relock_min_replicas.",
        )


def of_servers(servers: Sequence[Server]) -> Iterator[Finding]:
    """All that is wrong with them."""
    yield from serious(servers)
    yield from _of_each(servers, (_full, _clock, _latency, _connections))
    clocks = [server.clock[0] for server in servers]
    if clocks and max(clocks) - min(clocks) > _APART:
        yield Finding(
            "clock",
            WARNING,
            f"the clocks of the servers are {max(clocks) - min(clocks):.1f} s apart",
            "After a failover to a server whose clock is behind, fencing tokens can repeat.",
            "Keep all clocks right with NTP.",
        )


def serious(servers: Sequence[Server]) -> Iterator[Finding]:
    """What can lose parked messages, or stops every lock."""
    yield from _of_each(servers, (_version, _role, _eviction, _persistence, _replicas))


def _of_each(
    servers: Sequence[Server], checks: Sequence[Callable[[Server], Iterator[Finding]]]
) -> Iterator[Finding]:
    """What is wrong with each of them; of several servers with the addresses where it is so."""
    where: dict[Finding, list[str]] = {}
    for check in checks:
        for server in servers:
            for finding in check(server):
                where.setdefault(finding, []).append(server.at)
    for finding, at in where.items():
        several = f" ({', '.join(at)})" if len(servers) > 1 else ""
        yield replace(finding, what=finding.what + several)
