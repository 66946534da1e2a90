"""`scripts/mixed`: run campaigns, print what they found, and put it into the documentation."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tests.chaos.mixed.campaign import Campaign
from tests.chaos.mixed.judge import Report
from tests.chaos.parked.brokers import BROKERS
from tests.support import page


@click.command()
@click.option("--calls", default=1000, show_default=True, help="In each campaign.")
@click.option("--seed", default=1, show_default=True, help="Of the calls and of the faults.")
@click.option(
    "--broker", "brokers", multiple=True, default=("rabbitmq",), type=click.Choice([*BROKERS])
)
@click.option("--worker", default="", help="Arguments of the workers, such as '-P threads'.")
@click.option("--write", type=click.Path(path_type=Path), help="Put the figures into this page.")
def main(calls: int, seed: int, brokers: tuple[str, ...], worker: str, write: Path | None) -> None:
    """Send calls of every kind for the same few locks, kill pool processes and workers, freeze, cut
    and restart the Redis of the locks, and check the promises. The exit status is 1 if something
    was not as promised."""
    reports = {}
    for broker in brokers:
        report = Campaign(calls, broker, seed, worker=tuple(worker.split())).run()
        reports[broker] = report
        click.echo(f"{table({broker: report})}\n")
        for violation in report.violations:
            click.echo(f"VIOLATION {violation}", err=True)
        for task in report.unreceived:
            click.echo(f"not received: {task}", err=True)
    page.write(write, "mixed figures", table(reports), "scripts/mixed")
    sys.exit(any(report.violations for report in reports.values()))


def table(reports: dict[str, Report]) -> str:
    """A column for each campaign, as Markdown."""
    every = list(reports.values())
    rows: list[tuple[str, list[object]]] = [
        ("seconds", [f"{report.seconds:.0f}" for report in every]),
        ("kinds of calls", [len(report.sent) for report in every]),
        ("tasks", [report.sent.total() for report in every]),
        ("entries into a lock", [report.bodies for report in every]),
        ("entries beside another holder of a shared lock", [report.beside for report in every]),
    ]
    for kind in sorted({kind for report in every for kind in report.faults}):
        rows.append((kind, [report.faults[kind] for report in every]))
    rows += [
        ("tasks whose message no worker received", [len(report.unreceived) for report in every]),
        ("**violations**", page.bold(len(report.violations) for report in every)),
    ]
    return page.table(reports, rows)


if __name__ == "__main__":
    main()
