"""`scripts/failovers`: masters are killed under load, and what clients did meanwhile is judged.

Clients acquire a few locks and touch a register, on a server of its own, with their fencing token,
as long as their lock is not lost. A touch with a lower token than one before it is *late*: its
client believed in a lock that somebody else had by then. With `--min-replicas 1` there must be
none. Without there may be: the tokens tell them apart, which is what they are for. Two clients
never have one token.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from tests.support import RedisServer, programs, wait_for
from tests.support.cluster import ClusterServers
from tests.support.redis_server import find_redis_server
from tests.support.sentinel import Watched

CLIENTS, LOCKS = 4, 6

WORK = """
import logging, os, random, redis
logging.disable()
from celery_relock.engines import engine_for
from celery_relock.engine.protocol import Held
from celery_relock.errors import LockUnavailable
register = redis.Redis(port=PORT)
mine = engine_for(URL, NAMESPACE, None, None, (NEEDED, 0.5))
while not register.exists("end"):
    name = f"lock-{random.randrange(LOCKS)}"
    own = lease(mine, name, seconds=6.0)
    try:
        if isinstance(mine.acquire(own, 2.0), Held):
            until = time.monotonic() + random.choice((0.01, 0.1, 1.0, 4.0))
            while time.monotonic() < until and not own.lost:
                register.rpush(name, f"{own.fences[0]} {os.getpid()}")
                time.sleep(0.01)
        mine.release(own)
    except LockUnavailable:
        pass
"""


@contextmanager
def sentinel(binary: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """A master with two replicas and three Sentinels; and what makes a failover."""
    service = Watched(binary)

    def fail_over() -> None:
        old = service.master()
        old.kill()
        service.moved_from(old)
        service.whole()

    try:
        yield f"{service.url}?master_name={service.service}", fail_over
    finally:
        service.stop()


@contextmanager
def cluster(binary: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Three masters, each with a replica; and what makes a failover."""
    servers = ClusterServers(binary)
    turns = [0]

    def fail_over() -> None:
        masters = servers.masters()
        old = masters[turns[0] % len(masters)]
        turns[0] += 1
        servers.fail_over(old)
        servers.bring_back(old)

    try:
        yield servers.url, fail_over
    finally:
        servers.stop()


WAYS = {"sentinel": sentinel, "cluster": cluster}


@click.command()
@click.option("--on", "way", type=click.Choice(list(WAYS)), default="sentinel", show_default=True)
@click.option("--times", default=20, show_default=True, help="Failovers.")
@click.option("--min-replicas", "needed", default=0, show_default=True)
def main(way: str, times: int, needed: int) -> None:
    """Kill masters under load. The exit status is 1 if a promise was broken."""
    binary = find_redis_server()
    assert binary is not None, "no redis-server"
    register, namespace = RedisServer(), f"failovers{uuid.uuid4().hex[:8]}"
    client, pauses = register.client(), []
    parts = {"PORT": register.port, "NEEDED": needed, "LOCKS": LOCKS}
    source = WORK
    for word, value in parts.items():
        source = source.replace(word, str(value))

    def touches() -> int:
        return sum(client.llen(f"lock-{number}") for number in range(LOCKS))

    def work(more: int) -> None:
        seen = touches()
        wait_for(lambda: touches() > seen + more, 90.0, what="work")

    try:
        with WAYS[way](binary) as (url, fail_over):
            clients = [programs.start(source, url, namespace) for _ in range(CLIENTS)]
            work(100)
            for _ in range(times):
                began = time.monotonic()
                fail_over()
                work(50)
                pauses.append(time.monotonic() - began)
            client.set("end", 1)
            for one in clients:
                programs.finish(one)
        late, shared, grants = judge(client)
    finally:
        register.stop()
    click.echo(
        f"{way}, min_replicas={needed}: {times} failovers, {grants} holds, {sum(pauses):.0f} s, "
        f"longest {max(pauses, default=0):.1f} s; late touches: {late}; shared tokens: {shared}"
    )
    sys.exit(bool(shared or (needed and late)))


def judge(client: object) -> tuple[int, int, int]:
    """How many touches were late, how many tokens two clients had, how many tokens there were."""
    late, shared, grants = 0, 0, 0
    for number in range(LOCKS):
        highest, owners = 0, dict[int, str]()
        for line in client.lrange(f"lock-{number}", 0, -1):  # type: ignore[attr-defined]
            fence, pid = line.decode().split()
            late += int(fence) < highest
            highest = max(highest, int(fence))
            shared += owners.setdefault(int(fence), pid) != pid
        grants += len(owners)
    return late, shared, grants


if __name__ == "__main__":
    main()
