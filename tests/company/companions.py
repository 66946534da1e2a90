"""The other software beside which the library is run, and how a worker is started beside it.

Imported by the tests' process and by the workers: it imports none of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

#: Which companions a process is to have; set for workers, beat and Flower, not for the tests.
ENV = "RELOCK_COMPANY"

_BIN = Path(sys.executable).parent

_NEW_RELIC = {
    # No licence, no network: the agent answers itself.
    "NEW_RELIC_LICENSE_KEY": "0" * 40,
    "NEW_RELIC_DEVELOPER_MODE": "true",
    "NEW_RELIC_APP_NAME": "company",
    "NEW_RELIC_DISTRIBUTED_TRACING_ENABLED": "true",
    # Its configuration is not there until it has registered, at the first tasks.
    "NEW_RELIC_STARTUP_TIMEOUT": "5",
}
_DATADOG = {
    # Nobody listens there: traces are made and thrown away.
    "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
    "DD_CELERY_DISTRIBUTED_TRACING": "true",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    "DD_CRASHTRACKING_ENABLED": "false",
}


@dataclass(frozen=True)
class Companion:
    """One line of `docs/company.md`.

    Attributes:
        name: as it stands in the table.
        packages: what is installed, for the versions.
        instruments: what `instrument.py` sets up in the worker's process.
        launcher: what stands before the command of the worker.
        env: of the worker's process alone.
        module: run instead of `celery` (`python -m …`).
        arguments: more of them for the worker.
        pools: in which it is run; the first one in the short form as well.
        traces: whether it carries a trace from the sender to the execution.
    """

    name: str
    packages: tuple[str, ...]
    instruments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    module: str = "celery"
    arguments: tuple[str, ...] = ()
    pools: tuple[str, ...] = ("prefork", "threads")
    traces: bool = False

    def program(self) -> tuple[str, ...]:
        """The command before `-A …`, with an environment that the tests' process does not get."""
        env = {ENV: ",".join(self.instruments), **self.env}
        told = (f"{name}={value}" for name, value in env.items())
        return ("env", *told, *self.launcher, sys.executable, "-m", self.module)


COMPANIONS = (
    Companion("nobody", ("celery",)),
    Companion("sentry", ("sentry-sdk",), ("sentry",), traces=True),
    Companion(
        "newrelic",
        ("newrelic",),
        ("newrelic",),
        launcher=(str(_BIN / "newrelic-admin"), "run-program"),
        env=_NEW_RELIC,
        traces=True,
    ),
    Companion(
        "opentelemetry",
        ("opentelemetry-instrumentation-celery", "opentelemetry-sdk"),
        ("opentelemetry",),
        traces=True,
    ),
    Companion(
        "ddtrace",
        ("ddtrace",),
        ("ddtrace",),
        launcher=(str(_BIN / "ddtrace-run"),),
        env=_DATADOG,
        traces=True,
    ),
    Companion("elastic-apm", ("elastic-apm",), ("elastic-apm",), traces=True),
    Companion(
        "all tracers",
        (
            *("sentry-sdk", "newrelic", "opentelemetry-instrumentation-celery"),
            *("ddtrace", "elastic-apm"),
        ),
        ("sentry", "newrelic", "opentelemetry", "ddtrace", "elastic-apm"),
        launcher=(str(_BIN / "newrelic-admin"), "run-program", str(_BIN / "ddtrace-run")),
        env={**_NEW_RELIC, **_DATADOG},
        traces=True,
    ),
    Companion("django", ("django-celery-results", "django-celery-beat"), ("django",)),
    Companion(
        "flower",
        ("flower",),
        env={"FLOWER_UNAUTHENTICATED_API": "true"},
        arguments=("-E",),
        pools=("prefork",),
    ),
    Companion(
        "celery.contrib",
        ("celery",),
        module="tests.company.embedded",
        # A worker in a thread of the process that tests.
        pools=("threads",),
    ),
)
