"""How long a lock is idle while its queue has a backlog, and how often a message is delivered.

python -m benchmarks.backlog [--broker amqp://…//] [--tasks 120] [--seconds 0.1]
"""

from __future__ import annotations

import itertools
import statistics
import time
import uuid

import click

from tests.support import RedisServer, Worker, wait_for
from tests.support.parked import is_consumed, state_of

APP = "tests.worker.apps.resuming"
TURNS = 6


def measure(
    url: str, broker: str, multiplier: int, tasks: int, seconds: float
) -> tuple[list[float], float, float]:
    """The seconds that the lock was idle, the seconds that the backlog took, and the deliveries of
    each message."""
    env = {"RELOCK_TEST_BROKER": broker} if broker else {}
    options = ("--prefetch-multiplier", str(multiplier))
    worker = Worker(APP, url, f"ns{uuid.uuid4().hex[:12]}", env=env, arguments=options)
    try:
        m, account, journal = worker.module, uuid.uuid4().hex, worker.journal
        wait_for(lambda: is_consumed(worker))
        m.hold.delay(account)
        journal.wait_for("held")
        sent = [m.takes.delay(account) for _ in range(TURNS)]
        wait_for(lambda: state_of(worker, f"account:{account}").waiting == TURNS)
        for _ in range(tasks):
            m.filler.delay(seconds)
        last = m.note.delay("the end of the backlog")
        journal.add(f"free {account}")
        begun = time.time()
        took = journal.wait_for("took", timeout=300, count=TURNS)
        last.get(timeout=300)
        times = [begun, *(event.at for event in took)]
        idle = [after - before for before, after in itertools.pairwise(times)]
        deliveries = [e["id"] for e in journal.events("received")]
        each = statistics.mean(deliveries.count(result.id) for result in sent)
        return idle, time.time() - begun, each
    finally:
        worker.close()


@click.command()
@click.option("--broker", default="", help="A RabbitMQ; else the Redis that the locks are in.")
@click.option("--tasks", default=120, show_default=True, help="The backlog.")
@click.option("--seconds", default=0.1, show_default=True, help="Of each task of the backlog.")
@click.option("--rounds", default=3, show_default=True)
def main(broker: str, tasks: int, seconds: float, rounds: int) -> None:
    server = RedisServer()
    print("| prefetch multiplier | idle per turn, s: p50 | longest | backlog, s | deliveries |")
    print("|---|---|---|---|---|")
    try:
        for multiplier in (1, 4):
            found = [measure(server.url, broker, multiplier, tasks, seconds) for _ in range(rounds)]
            idle = [each for one, _, _ in found for each in one]
            lasted = statistics.mean(each for _, each, _ in found)
            delivered = statistics.mean(each for _, _, each in found)
            print(
                f"| {multiplier} | {statistics.median(idle):.2f} | {max(idle):.2f} "
                f"| {lasted:.1f} | {delivered:.2f} |"
            )
    finally:
        server.stop()


if __name__ == "__main__":
    main()
