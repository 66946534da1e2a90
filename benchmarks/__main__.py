"""`python -m benchmarks --help`: measure, print tables, and put them into the documentation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks import (
    coroutines,
    growth,
    handover,
    memory,
    ordering,
    pairs,
    renewal,
    task,
    waiting,
)
from tests.support import RedisServer, page

PARTS = ("pairs", "handover", "renewal", "memory", "growth", "task", "waiting", "ordering",
         "coroutines")  # fmt: skip


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option("--rounds", default=3, show_default=True, help="Of everything but pairs.")
@click.option("--pair-rounds", default=30, show_default=True)
@click.option("--pairs", "count", default=300, show_default=True, help="In a round.")
@click.option("--waiters", multiple=True, default=(2, 8, 32), show_default=True)
@click.option(
    "--section", multiple=True, default=(1.0, 20.0), show_default=True, help="Milliseconds inside."
)
@click.option("--seconds", default=2.0, show_default=True, help="Of one contended run, at least.")
@click.option("--locks", multiple=True, default=(1_000, 10_000), show_default=True)
@click.option("--sizes", multiple=True, default=(1, 10, 100, 1_000, 10_000), show_default=True)
@click.option("--executions", default=100_000, show_default=True, help="Through one semaphore.")
@click.option("--tasks", default=200, show_default=True, help="That wait, of 10 ms each.")
@click.option("--waiting-coroutines", default=5_000, show_default=True)
@click.option("--write", type=click.Path(path_type=Path), help="Put the tables into this page.")
def main(
    parts: tuple[str, ...],
    rounds: int,
    pair_rounds: int,
    count: int,
    waiters: tuple[int, ...],
    section: tuple[float, ...],
    seconds: float,
    locks: tuple[int, ...],
    sizes: tuple[int, ...],
    executions: int,
    tasks: int,
    waiting_coroutines: int,
    write: Path | None,
) -> None:
    """Measure the lock beside others: PARTS, or all of them, on a Redis server of its own."""
    server = RedisServer()

    def tables() -> Iterator[tuple[str, str]]:
        if "pairs" in wanted:
            yield "Uncontended", pairs.measure(server.url, pair_rounds, count)
        contended = itertools.product(section, waiters) if "handover" in wanted else ()
        for inside, number in contended:
            title = f"Contended: {number} processes, {inside:g} ms inside"
            yield title, handover.measure(server.url, rounds, number, inside / 1000, seconds)
        if "coroutines" in wanted:
            yield (
                f"{waiting_coroutines:,} waiting coroutines",
                coroutines.measure(server.url, waiting_coroutines),
            )
        for number in locks if "renewal" in wanted else ():
            yield f"Renewal of {number:,} locks", renewal.measure(server.url, rounds * 3, number)
        if "memory" in wanted:
            yield "Memory", memory.measure(server.url)
            yield "Memory of a namespace", memory.redis_bytes(server.url)
        if "growth" in wanted:
            yield "Growth", growth.measure(server.url, rounds * 5, sizes)
            yield "Through one semaphore", growth.through(server.url, executions)
        yield from _in_celery(server.url, wanted, rounds, tasks)

    wanted = parts or PARTS
    pages = []
    try:
        for title, text in tables():
            click.echo(f"\n### {title}\n\n{text}")
            pages.append(f"### {title}\n\n{text}")
    finally:
        server.stop()
    page.write(write, "figures", "\n\n".join(pages), "python -m benchmarks")


def _in_celery(
    url: str, wanted: tuple[str, ...], rounds: int, tasks: int
) -> Iterator[tuple[str, str]]:
    if "task" in wanted:
        yield from task.measure(url, rounds * 5, tasks)
    if "waiting" in wanted:
        yield "Waiting in Celery", waiting.measure(url, rounds, tasks, 0.01)
    if "ordering" in wanted:
        yield "In order for each key", ordering.measure(url, rounds, 2 * tasks, 0.02)


if __name__ == "__main__":
    main()
