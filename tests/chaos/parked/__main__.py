"""`scripts/parked`: run campaigns, print what they found, and put it into the documentation."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from tests.chaos.parked.brokers import BROKERS
from tests.chaos.parked.campaign import Campaign
from tests.chaos.parked.judge import Report
from tests.support import page


@click.command()
@click.option("--tasks", default=1000, show_default=True, help="In each campaign.")
@click.option("--keys", default=4, show_default=True, help="Locks that they want.")
@click.option("--faults", default=60, show_default=True, help="In each campaign.")
@click.option("--workers", default=3, show_default=True, help="With three children each.")
@click.option("--seed", default=1, show_default=True, help="Of the order of the faults.")
@click.option("--campaigns", default=1, show_default=True, help="Of each kind, seeds counted up.")
@click.option(
    "--broker", "brokers", multiple=True, default=("redis",), type=click.Choice([*BROKERS])
)
@click.option("--early", is_flag=True, help="Then one more campaign each, acknowledged early.")
@click.option("--write", type=click.Path(path_type=Path), help="Put the figures into this page.")
def main(
    tasks: int,
    keys: int,
    faults: int,
    workers: int,
    seed: int,
    campaigns: int,
    brokers: tuple[str, ...],
    early: bool,
    write: Path | None,
) -> None:
    """Let tasks wait for a few locks while workers are killed at every step, connections are cut
    and the Redis of the locks is killed, and check that none is lost. The exit status is 1 if
    something was not as promised."""
    reports: dict[str, list[Report]] = {}
    for broker, late in itertools.product(brokers, (True, False) if early else (True,)):
        name = f"{broker}, acknowledged {'late' if late else 'early'}"
        for number in range(seed, seed + campaigns):
            report = Campaign(tasks, keys, faults, workers, late, broker, seed=number).run()
            reports.setdefault(name, []).append(report)
            click.echo(f"seed {number}:\n{table({name: [report]})}\n")
            for violation in report.violations:
                click.echo(f"VIOLATION {violation}", err=True)
    page.write(write, "parked figures", table(reports), "scripts/parked")
    sys.exit(any(report.violations for each in reports.values() for report in each))


def table(reports: dict[str, list[Report]]) -> str:
    """A column for all campaigns of one kind together, as Markdown."""
    every = list(reports.values())

    def total(number: Callable[[Report], float]) -> list[object]:
        return [f"{sum(map(number, each)):.0f}" for each in every]

    kinds = sorted({kind for each in every for report in each for kind in report.faults})
    rows: list[tuple[str, list[object]]] = [
        ("campaigns", [len(each) for each in every]),
        ("seconds", total(lambda report: report.seconds)),
        ("tasks", total(lambda report: report.sent)),
        ("deliveries that came to an end", total(lambda report: report.deliveries)),
        ("entries into a lock", total(lambda report: report.entries)),
    ]
    for kind in kinds:
        rows.append((kind, total(partial(_count, kind))))
    rows += [
        ("pool processes killed", total(lambda report: report.killed)),
        ("run again, as the result was not stored", total(lambda report: report.again)),
        ("tasks lost on the way to the first worker", total(lambda report: report.unreceived)),
        ("**tasks lost**", page.bold(total(lambda report: len(report.lost)))),
        ("**violations**", page.bold(total(lambda report: len(report.violations)))),
    ]
    return page.table(reports, rows)


def _count(kind: str, report: Report) -> int:
    return report.faults[kind]


if __name__ == "__main__":
    main()
