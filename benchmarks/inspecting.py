"""`python -m benchmarks.inspecting`: `celery relock ls` in a Redis that is full of other keys."""

from __future__ import annotations

import time

import click
import redis

from benchmarks.rounds import table
from celery_relock.admin import Locks
from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.backends.redis.urls import transport_for_url
from celery_relock.engine.protocol import Claim
from tests.support import RedisServer

_BATCH = 10_000


@click.command()
@click.option("--locks", default=10_000, show_default=True)
@click.option("--others", default=1_000_000, show_default=True, help="Keys of somebody else.")
@click.option("--rounds", default=3, show_default=True)
def main(locks: int, others: int, rounds: int) -> None:
    """List LOCKS locks among OTHERS keys: how long it takes, and the longest command."""
    server = RedisServer()
    try:
        _fill(server, locks, others)
        rows = [_look(server, locks) for _ in range(rounds)]
    finally:
        server.stop()
    cpu = "processor time, s"
    head = ["locks", "other keys", "seconds", cpu, f"{cpu}, of Redis", "longest command, ms"]
    click.echo(table(head, [(locks, others, *row) for row in rows]))


def _fill(server: RedisServer, locks: int, others: int) -> None:
    client = server.client()
    for start in range(0, others, _BATCH):
        client.mset({f"other:{n}": "x" for n in range(start, min(start + _BATCH, others))})
    backend = RedisBackend(transport_for_url(server.url), "relock")
    for number in range(locks):
        name, label = f"account:{number}", f"shop.charge[{number}] web-1:4242"
        backend.acquire(Claim(f"e{number}", "a", "o", (name,), (1,), 3600.0, label))


def _look(server: RedisServer, locks: int) -> tuple[str, str, str, str]:
    client = server.client()
    client.config_set("slowlog-log-slower-than", 500)
    client.slowlog_reset()
    found, before = Locks(server.url), _server_cpu(client)
    started, cpu = time.perf_counter(), time.process_time()
    count = sum(1 for _ in found.find())
    seconds, own = time.perf_counter() - started, time.process_time() - cpu
    assert count == locks, count
    longest = max((each["duration"] for each in client.slowlog_get(1000)), default=500) / 1000
    of_server = _server_cpu(client) - before
    return f"{seconds:.2f}", f"{own:.2f}", f"{of_server:.2f}", f"{longest:.2f}"


def _server_cpu(client: redis.Redis) -> float:
    found = client.info("cpu")
    return float(found["used_cpu_user"] + found["used_cpu_sys"])


if __name__ == "__main__":
    main()
