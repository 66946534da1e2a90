"""`scripts/parked`: run campaigns, print what they found, and put it into the documentation."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import click

from tests.chaos.parked.brokers import BROKERS
from tests.chaos.parked.campaign import Campaign
from tests.chaos.parked.judge import Report

_BLOCK = re.compile(r"(<!-- parked figures -->\n).*?(<!-- /parked figures -->)", re.DOTALL)


@click.command()
@click.option("--tasks", default=1000, show_default=True, help="In each campaign.")
@click.option("--keys", default=4, show_default=True, help="Locks that they want.")
@click.option("--faults", default=60, show_default=True, help="In each campaign.")
@click.option("--workers", default=3, show_default=True, help="With three children each.")
@click.option("--seed", default=1, show_default=True, help="Of the order of the faults.")
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
    brokers: tuple[str, ...],
    early: bool,
    write: Path | None,
) -> None:
    """Let tasks wait for a few locks while workers are killed at every step, connections are cut
    and the Redis of the locks is killed, and check that none is lost. The exit status is 1 if
    something was not as promised."""
    reports = {}
    for broker, late in itertools.product(brokers, (True, False) if early else (True,)):
        name = f"{broker}, acknowledged {'late' if late else 'early'}"
        report = Campaign(tasks, keys, faults, workers, late, broker, seed=seed).run()
        reports[name] = report
        click.echo(f"{table({name: report})}\n")
        for violation in report.violations:
            click.echo(f"VIOLATION {violation}", err=True)
    if write is not None:
        text = f"    scripts/parked {' '.join(sys.argv[1:])}\n\n{table(reports)}\n"
        write.write_text(_BLOCK.sub(lambda m: m[1] + text + m[2], write.read_text()))
    sys.exit(any(report.violations for report in reports.values()))


def table(reports: dict[str, Report]) -> str:
    """A column for each campaign, as Markdown."""
    every = list(reports.values())
    rows: list[tuple[str, list[object]]] = [
        ("seconds", [f"{report.seconds:.0f}" for report in every]),
        ("tasks", [report.sent for report in every]),
        ("deliveries that came to an end", [report.deliveries for report in every]),
        ("entries into a lock", [report.entries for report in every]),
    ]
    for kind in sorted({kind for report in every for kind in report.faults}):
        rows.append((kind, [report.faults[kind] for report in every]))
    rows += [
        ("pool processes killed", [report.killed for report in every]),
        ("run again, as the result was not stored", [report.again for report in every]),
        ("tasks lost on the way to the first worker", [report.unreceived for report in every]),
        ("**tasks lost**", [f"**{len(report.lost)}**" for report in every]),
        ("**violations**", [f"**{len(report.violations)}**" for report in every]),
    ]
    lines = [["", *reports], ["---"] * (len(reports) + 1)]
    lines += [[label, *map(str, cells)] for label, cells in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
