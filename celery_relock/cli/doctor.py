"""`doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import click

from ..admin.names import plain
from ..doctor import Report, examine
from ..engine.diagnosis import ERROR, NOTICE, SEVERITIES, WARNING
from ..errors import LockConfigError
from .base import FOUND, NOT_FOUND, SECONDS, Here, command


@command
@click.option("--workers/--no-workers", default=True, help="Also ask the workers.")
@click.option(
    "--timeout",
    type=SECONDS,
    default=1.0,
    show_default=True,
    help="Seconds for workers to answer.",
)
@click.option(
    "--fail-on",
    type=click.Choice([ERROR, WARNING, NOTICE, "never"]),
    default=WARNING,
    show_default=True,
    help="The least severity for which the exit code is 1.",
)
def doctor(here: Here, workers: bool, timeout: float, fail_on: str) -> int:
    """Find problems before they hurt: in settings, Redis, workers and parked tasks.

    The exit code is 1 if there is a finding of --fail-on, or worse. Nothing is changed.
    """
    with suppress(LockConfigError):  # the report tells it
        here.locks  # noqa: B018  # says so if neither an app nor a Redis was given
    report = examine(here.app, here.redis, here.namespace, workers=workers, timeout=timeout)
    here.show(report.as_dict(), map(plain, _described(report)))
    if fail_on == "never" or not report.worst:
        return FOUND
    bad = SEVERITIES.index(report.worst) <= SEVERITIES.index(fail_on)
    return NOT_FOUND if bad else FOUND


def _described(report: Report) -> Iterator[str]:
    """The report as lines of text."""
    for finding in report.findings:
        yield f"{finding.severity.upper()}: {finding.what}"
        yield f"  why: {finding.why}"
        yield f"  do:  {finding.do}"
    facts = report.facts
    for server in facts.get("servers", ()):
        trip = server["round_trip"]
        yield (
            f"server{server['address'] and ' ' + server['address']}: "
            f"Redis {server['version'] or '?'}, {server['role'] or '?'}, round trip "
            + (f"{trip * 1000:.2f} ms" if trip is not None else "?")
            + f", clock {server['clock_ahead']:+.3f} s"
        )
    if memory := facts.get("memory"):
        yield f"keys: {memory['keys']} in the database, {memory['sampled']} looked at"
        for kind in memory["kinds"]:
            yield f"  {kind['kind']}: about {kind['keys']} ({kind['bytes'] / 1024:.0f} kB)"
    for name, told in sorted(facts.get("workers", {}).items()):
        beside = ", ".join(told.get("beside") or ()) or "nothing known"
        yield (
            f"worker: {name}, celery-relock {told.get('version')}, "
            f"namespace {told.get('namespace')}, "
            f"locked tasks: {len(told.get('tasks') or ())}, beside {beside}"
        )
    worst = {name: sum(f.severity == name for f in report.findings) for name in SEVERITIES}
    yield ", ".join(f"{n} {name}{'' if n == 1 else 's'}" for name, n in worst.items())
