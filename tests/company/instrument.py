"""What a worker's process sets up for its companions, as their manuals say. No network.

`active()` and `traces()` are asked from a task's body: is the companion really there, and which
trace is it in?
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tests.company.companions import ENV

CHOSEN = tuple(filter(None, os.environ.get(ENV, "").split(",")))


def _sentry() -> None:
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.transport import Transport

    class Swallowing(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            for item in envelope.items:
                _told_sentry(item.type, item.payload.json)

    sentry_sdk.init(
        dsn="http://key@127.0.0.1/1",
        send_default_pii=True,  # arguments: they say which scenario it is
        transport=Swallowing,
        traces_sample_rate=1.0,
        integrations=[CeleryIntegration(monitor_beat_tasks=True)],
    )


def _told_sentry(kind: str, told: Any) -> None:
    from tests.company.app import journal

    if kind == "event":
        key = told.get("extra", {}).get("celery-job", {}).get("args", [""])[0]
        raised = told.get("exception", {}).get("values") or [{}]
        error = raised[-1].get("value") or str(told.get("logentry"))
        journal().add("reported", key=key, error=error)
    elif kind == "check_in":
        found = {"check_in": told["check_in_id"], "status": told["status"]}
        journal().add("check-in", key=told["monitor_slug"], **found)


def _opentelemetry() -> None:
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())  # spans that go nowhere
    CeleryInstrumentor().instrument()


def _elastic() -> None:
    import elasticapm
    from elasticapm.contrib.celery import register_exception_tracking, register_instrumentation

    client = elasticapm.Client(
        service_name="company",
        disable_send=True,
        central_config=False,
        cloud_provider="none",
        metrics_interval="0s",
    )
    elasticapm.instrument()
    register_exception_tracking(client)
    register_instrumentation(client)


def _django() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.company.django_settings")
    import django

    django.setup()


def _by_its_launcher() -> None:
    """newrelic-admin and ddtrace-run have done it before."""


_SET_UP: dict[str, Callable[[], None]] = {
    "sentry": _sentry,
    "newrelic": _by_its_launcher,
    "opentelemetry": _opentelemetry,
    "ddtrace": _by_its_launcher,
    "elastic-apm": _elastic,
    "django": _django,
}


def set_up() -> None:
    for each in CHOSEN:
        _SET_UP[each]()


def _sentry_sees() -> tuple[str, str]:
    import sentry_sdk

    span = sentry_sdk.get_current_span()
    if span is None:
        return "", ""
    return str(span.containing_transaction.name), span.trace_id


def _newrelic_sees() -> tuple[str, str]:
    from newrelic import agent

    transaction = agent.current_transaction()
    return (transaction.name, agent.current_trace_id()) if transaction else ("", "")


def _opentelemetry_sees() -> tuple[str, str]:
    from opentelemetry import trace

    span: Any = trace.get_current_span()
    return getattr(span, "name", ""), f"{span.get_span_context().trace_id:032x}"


def _ddtrace_sees() -> tuple[str, str]:
    from ddtrace.trace import tracer

    span = tracer.current_root_span()
    return (span.resource, f"{span.trace_id:032x}") if span else ("", "")


def _elastic_sees() -> tuple[str, str]:
    import elasticapm
    from elasticapm.traces import execution_context

    transaction = execution_context.get_transaction()
    return (transaction.transaction_type, elasticapm.get_trace_id()) if transaction else ("", "")


def _django_sees() -> tuple[str, str]:
    from celery import current_app

    return type(current_app.backend).__module__, ""


_SEES: dict[str, Callable[[], tuple[str, str]]] = {
    "sentry": _sentry_sees,
    "newrelic": _newrelic_sees,
    "opentelemetry": _opentelemetry_sees,
    "ddtrace": _ddtrace_sees,
    "elastic-apm": _elastic_sees,
    "django": _django_sees,
}


def seen() -> dict[str, str]:
    """What each companion calls the task that runs now; empty text if it does not see it."""
    return {each: _SEES[each]()[0] for each in CHOSEN}


def traces() -> dict[str, str]:
    """The trace id of each companion that has one."""
    found = {each: _SEES[each]()[1] for each in CHOSEN}
    return {each: trace for each, trace in found.items() if trace}
