"""Metrics of locks for Prometheus. Needs `celery-relock[prometheus]`.

    from celery_relock.contrib import prometheus

    prometheus.instrument(port=9808)      # where you create the app

Every process counts for itself, and in a prefork pool the children do the work. So set
`PROMETHEUS_MULTIPROC_DIR` to an empty folder before the worker starts, as prometheus-client
requires: the worker's main process then serves the sums of all processes. Each port needs a folder
of its own: it serves all that the folder has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from celery.signals import worker_process_init, worker_ready
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from ..engine.events import logger
from ..errors import LockConfigError
from . import metrics

PREFIX = "relock_"
_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_ID = "celery_relock.prometheus"
# The registry of the first call of `instrument`.
_registries: list[CollectorRegistry] = []


def instrument(
    *,
    port: int | None = None,
    addr: str = "0.0.0.0",
    templates: bool = False,
    buckets: Sequence[float] = metrics.BOUNDS,
    registry: CollectorRegistry = REGISTRY,
) -> None:
    """Measure the locks of this process and of its children. A further call, as for a second app,
    has no effect, except that it can give the port.

    Args:
        port: the port on which a worker's main process serves its metrics; None does not serve
            them. Two workers on one host need two ports, and two folders.
        addr: the address to listen on.
        templates: whether to add a label `key`, the template of the task's `lock_key`.
        buckets: the upper bounds of the histograms' buckets, in seconds.
        registry: where to register the metrics.

    Raises:
        LockConfigError: an earlier call gave another registry.
    """
    if not _registries:
        _measure(templates, buckets, registry)
        _registries.append(registry)
    elif registry is not _registries[0]:
        raise LockConfigError(
            "the locks of this process are measured already, in another registry: give the same "
            "one to each call of instrument()"
        )
    worker_ready.connect(_warn, weak=False, dispatch_uid=f"{_ID}.warn")
    if port is not None:
        _serve_from_worker(port, addr, registry)


def _measure(templates: bool, buckets: Sequence[float], registry: CollectorRegistry) -> None:
    task = ("task", "key") if templates else ("task",)
    made: dict[str, Any] = {}
    for name, (about, labels) in metrics.COUNTERS.items():
        made[name] = Counter(PREFIX + name, about, (*task, *labels), registry=registry)
    for name, (about, labels) in metrics.HISTOGRAMS.items():
        full = metric_name(name)
        made[name] = Histogram(full, about, (*task, *labels), buckets=buckets, registry=registry)

    def record(name: str, value: float, labels: Mapping[str, str]) -> None:
        metric = made[name].labels(**labels)
        if name in metrics.HISTOGRAMS:
            metric.observe(value)
        else:
            metric.inc(value)

    metrics.connect("prometheus", record, templates)


def metric_name(name: str) -> str:
    """The name of an instrument in Prometheus. The client appends `_total` to counters."""
    return f"{PREFIX}{name}{'_seconds' if name in metrics.SECONDS else ''}"


def _serve_from_worker(port: int, addr: str, registry: CollectorRegistry) -> None:
    served: list[Any] = []

    def serve(**_: Any) -> None:
        # Once the pool has forked: a child would inherit the socket without the thread.
        try:
            served.append(start_http_server(port, addr, registry=_shown(registry))[0])
        except (OSError, ValueError) as error:  # the port is in use; there is no such folder
            logger.error("metrics: cannot serve them at %s:%s: %s", addr, port, error)

    def forked(**_: Any) -> None:
        # A replacement child is forked later. It inherits the socket, and would keep the port.
        for server in served:
            server.socket.close()

    worker_ready.connect(serve, weak=False, dispatch_uid=_ID)
    worker_process_init.connect(forked, weak=False, dispatch_uid=_ID)


def _shown(registry: CollectorRegistry) -> CollectorRegistry:
    """What to serve: the sums of all processes if they keep files, else this process's metrics."""
    if _FOLDER not in os.environ:
        return registry
    sums = CollectorRegistry()
    MultiProcessCollector(sums)  # type: ignore[no-untyped-call]
    return sums


def _warn(sender: Any = None, **_: Any) -> None:
    pool = type(getattr(sender, "pool", None)).__module__
    if _FOLDER not in os.environ and pool.endswith(".prefork"):
        logger.error(
            "metrics: %s is not set, so the counts of this pool's children are not collected. "
            "Set it to an empty folder before the worker starts",
            _FOLDER,
        )


class Gauges:
    """A collector of the gauges of a namespace. Register it in one process.

    Args:
        locks: a `celery_relock.admin.Locks`.
    """

    def __init__(self, locks: Any) -> None:
        self._figures = metrics.Figures(locks)

    def describe(self) -> list[Any]:
        """Nothing, so that registering the collector does not read from Redis."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges. If Redis cannot be reached, `relock_up` is 0 and the others are missing."""
        found = self._figures.read()
        yield GaugeMetricFamily(
            "relock_up", "Whether the Redis of the locks can be read", int(found is not None)
        )
        yield GaugeMetricFamily(
            "relock_read_seconds", "Seconds that the last read from Redis took", self._figures.took
        )
        if found is None:
            return
        for name, about in metrics.GAUGES.items():
            yield GaugeMetricFamily(metric_name(name), about, found[name])


def serve(locks: Any, port: int, addr: str = "0.0.0.0") -> Any:
    """Serve the gauges over HTTP from a thread of this process.

    Args:
        locks: a `celery_relock.admin.Locks`.
        port: the port; 0 for any free port.
        addr: the address to listen on.

    Returns:
        The HTTP server, with `server_port` and `shutdown()`.

    Raises:
        OSError: the port or the address cannot be used.
        UnicodeError: the address is no host name.
    """
    registry = CollectorRegistry()
    registry.register(Gauges(locks))
    return start_http_server(port, addr, registry=registry)[0]
