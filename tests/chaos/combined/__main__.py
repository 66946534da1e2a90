"""`scripts/combined`: run rounds, and print what they found."""

from __future__ import annotations

import sys
import time
from collections import Counter

import click

from tests.chaos.combined.campaign import Campaign
from tests.chaos.parked.brokers import BROKERS
from tests.support import page


@click.command()
@click.option("--seconds", default=300.0, show_default=True, help="Then no further round begins.")
@click.option("--seed", default=1, show_default=True, help="Of the first round; counted up.")
@click.option("--broker", default="redis", show_default=True, type=click.Choice([*BROKERS]))
@click.option(
    "--pool",
    default="prefork",
    show_default=True,
    type=click.Choice(["prefork", "threads", "gevent"]),
)
@click.option("--kills", is_flag=True, help="Kill pool processes, and end workers.")
@click.option("--cuts", is_flag=True, help="Cut the connections to the Redis of the locks.")
@click.option("--items", default=20, show_default=True, help="In each round.")
def main(
    seconds: float,
    seed: int,
    broker: str,
    pool: str,
    kills: bool,
    cuts: bool,
    items: int,
) -> None:
    """Make tasks with random options and random canvases of them, round by round, run each of them
    with locks and without, and check the promises. A round of one seed is always the same, but for
    its timing: `--seconds 0` runs it alone. The exit status is 1 if something was not as
    promised."""
    began, total = time.monotonic(), Counter[str]()
    again = f"--broker {broker} --pool {pool} --items {items}{' --kills' * kills}{' --cuts' * cuts}"
    rounds = Campaign(broker, pool, kills, cuts, items).rounds(seed)
    for of, report in rounds:
        found = f"{len(report.violations)} violations" if report.violations else "fine"
        click.echo(f"seed {of.seed}: {report.bodies} bodies, {report.waited} waited: {found}")
        for violation in report.violations:
            click.echo(f"VIOLATION {violation}", err=True)
        if report.violations:
            click.echo(f"again: scripts/combined --seconds 0 --seed {of.seed} {again}", err=True)
        total["rounds"] += 1
        total["results"] += report.results
        total["bodies with a lock"] += report.bodies
        total["bodies that had been parked"] += report.waited
        total += report.faults
        total["violations"] += len(report.violations)
        if time.monotonic() - began > seconds:
            break
    rounds.close()
    total["seconds"] = round(time.monotonic() - began)
    name = f"{broker}, {pool}{', kills' * kills}{', cuts' * cuts}"
    click.echo(f"\n{page.table([name], [(label, [count]) for label, count in total.items()])}")
    sys.exit(bool(total["violations"]))


if __name__ == "__main__":
    main()
