"""`scripts/chaos`: run campaigns, print what they found, and put it into the documentation."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tests.chaos.campaign import Campaign, Report
from tests.chaos.register import KINDS
from tests.support import page


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="Length of a campaign.")
@click.option("--processes", default=6, show_default=True)
@click.option("--threads", default=2, show_default=True, help="Threads in each process.")
@click.option("--lease", default=1.0, show_default=True, help="Seconds.")
@click.option("--seed", default=1, show_default=True, help="Of the order of the faults.")
@click.option("--campaigns", default=1, show_default=True, help="With seeds counted up.")
@click.option("--write", type=click.Path(path_type=Path), help="Put the figures into this page.")
def main(
    seconds: float,
    processes: int,
    threads: int,
    lease: float,
    seed: int,
    campaigns: int,
    write: Path | None,
) -> None:
    """Let processes fight over locks while they are killed and frozen and Redis fails, and check
    that the locks kept what they promise. The exit status is 1 if they did not."""
    reports = []
    for number in range(seed, seed + campaigns):
        report = Campaign(seconds, processes, threads, lease, number).run()
        click.echo(f"seed {number}:\n{table([report])}")
        for violation in report.violations:
            click.echo(f"VIOLATION {violation}", err=True)
        reports.append(report)
    page.write(write, "figures", table(reports), "scripts/chaos")
    sys.exit(any(report.violations for report in reports))


def table(reports: list[Report]) -> str:
    """All campaigns together, as Markdown."""
    rows: list[tuple[str, object]] = [
        ("campaigns", len(reports)),
        ("seconds", f"{sum(report.seconds for report in reports):.0f}"),
        ("calls of `acquire`", sum(report.visits for report in reports)),
        ("entries", sum(report.entries for report in reports)),
        ("visits that shared a lock", sum(report.shared for report in reports)),
        ("most that shared a lock at one time", max(r.most_beside for r in reports)),
        ("longest wait for a lock, s", f"{max(r.longest_wait for r in reports):.1f}"),
    ]
    for counter, label in (("outcomes", "visits: {}"), ("faults", "faults: {}")):
        kinds = sorted({kind for report in reports for kind in getattr(report, counter)})
        for kind in kinds:
            total = sum(getattr(report, counter)[kind] for report in reports)
            rows.append((label.format(kind), total))
    for kind in KINDS:
        lost, writes = (sum(getattr(r, what)[kind] for r in reports) for what in ("lost", "writes"))
        rows.append((f"lost updates, {kind} register", f"{lost} of {writes}"))
    rows.append(("**violations**", f"**{sum(len(report.violations) for report in reports)}**"))
    lines = ["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
