"""`scripts/ordered`: run campaigns, print what they found, and put it into the documentation."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tests.chaos.ordered.campaign import Campaign
from tests.chaos.ordered.judge import Report
from tests.chaos.parked.brokers import BROKERS
from tests.support import page


@click.command()
@click.option("--calls", default=20_000, show_default=True, help="In each campaign.")
@click.option("--keys", default=50, show_default=True, help="Lock names that they have.")
@click.option("--senders", default=8, show_default=True, help="Processes.")
@click.option("--workers", default=4, show_default=True, help="With two children each.")
@click.option("--faults", default=80, show_default=True, help="In each campaign.")
@click.option("--seed", default=1, show_default=True, help="Of the keys and of the faults.")
@click.option(
    "--broker", "brokers", multiple=True, default=("redis",), type=click.Choice([*BROKERS])
)
@click.option("--write", type=click.Path(path_type=Path), help="Put the figures into this page.")
def main(
    calls: int,
    keys: int,
    senders: int,
    workers: int,
    faults: int,
    seed: int,
    brokers: tuple[str, ...],
    write: Path | None,
) -> None:
    """Send calls that are to run in order, kill senders, workers and pool processes, take messages
    away, and check that per key the bodies begin in the order of sending. The exit status is 1 if
    something was not as promised."""
    reports = {}
    for broker in brokers:
        report = Campaign(calls, keys, senders, workers, faults, broker, seed=seed).run()
        reports[broker] = report
        click.echo(f"{table({broker: report})}\n")
        for violation in report.violations:
            click.echo(f"VIOLATION {violation}", err=True)
    page.write(write, "ordered figures", table(reports), "scripts/ordered")
    sys.exit(any(report.violations for report in reports.values()))


def table(reports: dict[str, Report]) -> str:
    """A column for each campaign, as Markdown."""
    every = list(reports.values())
    rows: list[tuple[str, list[object]]] = [
        ("seconds", [f"{report.seconds:.0f}" for report in every]),
        ("calls", [report.calls for report in every]),
        ("bodies begun", [report.begun for report in every]),
        ("calls whose retry has begun", [report.retried for report in every]),
    ]
    for kind in sorted({kind for report in every for kind in report.faults}):
        rows.append((kind, [report.faults[kind] for report in every]))
    rows += [
        ("calls whose sender was killed meanwhile", [report.unsent for report in every]),
        ("lost with a worker by Celery's Redis transport", [report.unreceived for report in every]),
        ("begun again, as their process was killed", [report.again for report in every]),
        ("begun and told to be out of order", [report.early for report in every]),
        ("**violations**", page.bold(len(report.violations) for report in every)),
    ]
    return page.table(reports, rows)


if __name__ == "__main__":
    main()
