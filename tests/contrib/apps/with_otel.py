"""What a worker that sends metrics and spans imports: an SDK in each process, which writes what it
exports to the file `TEST_OTEL_FILE`; and a span around each task, as the instrumentation of
OpenTelemetry for Celery makes one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery.signals import task_postrun, task_prerun, worker_process_init
from opentelemetry import context, metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from celery_relock.contrib import otel

otel.instrument()

_FILE = Path(os.environ["TEST_OTEL_FILE"])
_open: dict[str, tuple[Any, Any]] = {}
_reader = InMemoryMetricReader()


def _write(**line: Any) -> None:
    with _FILE.open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), **line}) + "\n")


class _ToFile(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            events = [[event.name, dict(event.attributes or {})] for event in span.events]
            _write(span=span.name, attributes=dict(span.attributes or {}), events=events)
        return SpanExportResult.SUCCESS


@worker_process_init.connect
def set_up(**_: Any) -> None:
    metrics.set_meter_provider(MeterProvider([_reader]))
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(_ToFile()))
    trace.set_tracer_provider(provider)


@task_prerun.connect
def begin(task_id: str = "", **_: Any) -> None:
    span = trace.get_tracer(__name__).start_span(task_id)
    _open[task_id] = span, context.attach(trace.set_span_in_context(span))


@task_postrun.connect
def end(task_id: str = "", **_: Any) -> None:
    span, token = _open.pop(task_id)
    context.detach(token)
    span.end()
    data = _reader.get_metrics_data()
    for resource in data.resource_metrics if data else ():
        for metric in resource.scope_metrics[0].metrics:
            for point in metric.data.data_points:
                value = getattr(point, "value", None)
                amount = point.count if value is None else value  # type: ignore[union-attr]
                _write(
                    metric=metric.name,
                    unit=metric.unit,
                    labels=dict(point.attributes or {}),
                    value=amount,
                )
