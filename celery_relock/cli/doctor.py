"""`doctor`."""

from __future__ import annotations

from contextlib import suppress

import click

from ..admin.names import plain
from ..doctor import describe, examine
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
    here.show(report.as_dict(), map(plain, describe(report)))
    if fail_on == "never" or not report.worst:
        return FOUND
    bad = SEVERITIES.index(report.worst) <= SEVERITIES.index(fail_on)
    return NOT_FOUND if bad else FOUND
