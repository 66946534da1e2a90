"""Metrics and spans of locks for OpenTelemetry. Needs `celery-relock[otel]`, which installs the API
alone: your application sets up the SDK that exports them.

    from celery_relock.contrib import otel

    otel.instrument()      # where you create the app
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

from opentelemetry import metrics as api
from opentelemetry import trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from .. import signals
from ..errors import LockConfigError
from ..version import __version__
from . import metrics

_NAME = "celery_relock"
_ID = "celery_relock.otel"
# The meter provider of the first call of `instrument`.
_providers: list[MeterProvider | None] = []


def instrument(
    *, meter_provider: MeterProvider | None = None, templates: bool = False, spans: bool = True
) -> None:
    """Measure the locks of this process and of its children, and annotate their current spans. You
    can set the global providers later, for example in each child of a pool. A further call has no
    effect, except that it can add the spans.

    Args:
        meter_provider: the meter provider; None for the global provider.
        templates: whether to add an attribute `relock.key`, the template of the task's `lock_key`.
        spans: whether to add attributes `relock.*` to the span of an execution that acquires a
            lock, and an event for each wait and each loss.

    Raises:
        LockConfigError: an earlier call gave another meter provider.
    """
    if not _providers:
        _measure(meter_provider, templates)
        _providers.append(meter_provider)
    elif meter_provider is not _providers[0]:
        raise LockConfigError(
            "the locks of this process are measured already, with another meter provider: give the "
            "same one to each call of instrument()"
        )
    if spans:
        _annotate_spans()


def _measure(meter_provider: MeterProvider | None, templates: bool) -> None:
    meter = api.get_meter(_NAME, __version__, meter_provider)
    measures: dict[str, Callable[[float, dict[str, str]], None]] = {
        name: meter.create_counter(f"relock.{name}", description=each.about).add
        for name, each in metrics.COUNTERS.items()
    }
    for name, each in metrics.HISTOGRAMS.items():
        measures[name] = meter.create_histogram(
            f"relock.{name}",
            unit="s",
            description=each.about,
            explicit_bucket_boundaries_advisory=list(metrics.BOUNDS),
        ).record

    def record(name: str, value: float, labels: Mapping[str, str]) -> None:
        measures[name](value, {f"relock.{label}": text for label, text in labels.items()})

    metrics.connect("otel", record, templates)


def observe(locks: Any, meter_provider: MeterProvider | None = None) -> None:
    """Read the gauges from Redis whenever metrics are exported. Call it in one process: each read
    scans all keys of the database.

    Args:
        locks: a `celery_relock.admin.Locks`.
        meter_provider: the meter provider; None for the global provider.
    """
    meter = api.get_meter(_NAME, __version__, meter_provider)
    figures = metrics.Figures(locks)

    def values(name: str) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def callback(_: CallbackOptions) -> Iterator[Observation]:
            found = figures.read()
            if found is not None:
                yield Observation(found[name])

        return callback

    for name, about in metrics.GAUGES.items():
        unit = "s" if name in metrics.SECONDS else ""
        meter.create_observable_gauge(f"relock.{name}", [values(name)], unit, about)


# The current span is the task's: a lock's signals are sent where its task runs. A loss is announced
# in another thread, so the span of each hold is known until it ends. Weak: of a step that leaves
# its lock to the next one, no release is announced.
_of_execution: WeakValueDictionary[str, trace.Span] = WeakValueDictionary()


def _annotate_spans() -> None:
    for signal, receive in (
        (signals.lock_acquired, _acquired),
        (signals.lock_waiting, _waits),
        (signals.lock_parked, _waits),
        (signals.lock_conflict, _waits),
        (signals.lock_unavailable, _waits),
        (signals.lock_released, _released),
        (signals.lock_lost, _lost),
    ):
        signal.connect(receive, weak=False, dispatch_uid=_ID)


def _acquired(execution_id: str = "", **told: Any) -> None:
    span = trace.get_current_span()
    if not (told["fence"] and span.is_recording()):  # no token: relock_enabled=False
        return
    # Beside the locks that it names already: a task can call another inline. (The API's spans
    # cannot be read, those of the SDK can.)
    known = (getattr(span, "attributes", None) or {}).get("relock.names", ())
    span.set_attributes(_attributes(told))
    span.set_attribute("relock.names", [*dict.fromkeys((*known, *told["names"]))])
    span.set_attribute("relock.waited", told["waited"])
    span.set_attribute("relock.reentered", told["reentered"])
    if told["waited"]:
        span.add_event("relock.acquired", {**_attributes(told), "relock.waited": told["waited"]})
    _of_execution[execution_id] = span


def _waits(signal: Any = None, policy: str = "", reason: str = "", **told: Any) -> None:
    kind = signal.name.removeprefix("lock_")
    more = {"relock.policy": policy, "relock.reason": reason} if policy else {}
    trace.get_current_span().add_event(f"relock.{kind}", {**_attributes(told), **more})


def _released(execution_id: str = "", held: float = 0.0, **_: Any) -> None:
    span = _of_execution.pop(execution_id, None)
    if span is not None:
        span.set_attribute("relock.held", held)


def _lost(execution_id: str = "", reason: str = "", **told: Any) -> None:
    span = _of_execution.pop(execution_id, None) or trace.get_current_span()
    span.add_event("relock.lost", {**_attributes(told), "relock.reason": reason})
    span.set_attribute("relock.lost", True)


def _attributes(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "relock.names": list(told["names"]),
        "relock.owner": told["owner"],
        "relock.fence": told["fence"],
    }
