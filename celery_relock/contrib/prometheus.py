"""Metrics of locks for Prometheus. Needs `celery-relock[prometheus]`.

    from celery_relock.contrib import prometheus

    prometheus.instrument(port=9808)      # where the app is made

Every process counts what happens in it, and in a prefork pool that is in the children. So set
`PROMETHEUS_MULTIPROC_DIR` to an empty folder before the worker starts, as prometheus-client asks
for: the worker's main process then serves the sums of all.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from celery.signals import worker_process_init, worker_ready
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from . import metrics

logger = logging.getLogger("celery_relock")

PREFIX = "relock_"
# Of the metrics in seconds, behind their name.
_SECONDS = {"wait", "hold", "oldest_wait"}
_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_ID = "celery_relock.prometheus"


def instrument(
    *,
    port: int | None = None,
    addr: str = "0.0.0.0",
    templates: bool = False,
    buckets: Sequence[float] = metrics.BOUNDS,
    registry: CollectorRegistry = REGISTRY,
) -> None:
    """Measure the locks of this process and of its children.

    Args:
        port, addr: where a worker serves its metrics, from its main process; None leaves that to
            you. Two workers on one host need two ports.
        templates: add a label `key`, the template of the task's `lock_key`.
        buckets: of the histograms, in seconds.
        registry: for the metrics.
    """
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
    worker_ready.connect(_warn, weak=False, dispatch_uid=f"{_ID}.warn")
    if port is not None:
        _serve_from_worker(port, addr, registry)


def metric_name(name: str) -> str:
    """The name of an instrument in Prometheus; counters have `_total` behind it."""
    return f"{PREFIX}{name}{'_seconds' if name in _SECONDS else ''}"


def _serve_from_worker(port: int, addr: str, registry: CollectorRegistry) -> None:
    served: list[Any] = []

    def serve(**_: Any) -> None:
        # After the pool has forked: a child has no thread that would serve.
        served.append(start_http_server(port, addr, registry=_shown(registry))[0])

    def forked(**_: Any) -> None:
        # A child that replaces another one has a copy of the socket, and must not keep the port.
        for server in served:
            server.socket.close()

    worker_ready.connect(serve, weak=False, dispatch_uid=_ID)
    worker_process_init.connect(forked, weak=False, dispatch_uid=_ID)


def _shown(registry: CollectorRegistry) -> CollectorRegistry:
    """What is served: the sums of all processes where they are kept, else this one's metrics."""
    if _FOLDER not in os.environ:
        return registry
    sums = CollectorRegistry()
    Sums(sums)
    return sums


class Sums(MultiProcessCollector):
    """The sums of all processes. What those have counted that are gone is added up in one file:
    each scrape reads all files, and with `worker_max_tasks_per_child` there would be more and more.

    Args:
        registry: to register it with.
        path: the folder, else that of `PROMETHEUS_MULTIPROC_DIR`.
    """

    #: So many files are left as they are.
    FEW = 40

    def __init__(self, registry: CollectorRegistry, path: str | None = None) -> None:
        super().__init__(registry, path)  # type: ignore[no-untyped-call]
        self._folder = Path(self._path)

    def collect(self) -> Any:
        """The metrics. Workers that share a folder, and scrapes, wait for each other."""
        with (self._folder / "gone.lock").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            try:
                return self._collected()
            finally:
                # To close it is not enough: a child that the pool has forked meanwhile has it open.
                fcntl.flock(guard, fcntl.LOCK_UN)

    def _collected(self) -> list[Any]:
        for kind in ("counter", "histogram", "summary"):
            gone = [p for p in self._folder.glob(f"{kind}_*.db") if _is_gone(p)]
            if len(gone) > self.FEW:
                _add_up(self._folder / f"{kind}_gone.db", gone)
        for empty in [p for p in self._folder.glob("*.db") if not p.stat().st_size]:
            if _is_gone(empty):
                empty.unlink()  # its process was killed while it made the file
        for wait in (0.02, 0.05, 0.1, 0.2, 0.5):
            try:
                return list(super().collect())  # type: ignore[no-untyped-call]
            except struct.error:
                time.sleep(wait)  # a child makes its file, which is empty for a moment
        return list(super().collect())  # type: ignore[no-untyped-call]


def _is_gone(path: Path) -> bool:
    pid = path.stem.rpartition("_")[2]
    return pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists()


def _add_up(path: Path, gone: Sequence[Path]) -> None:
    sums = MmapedDict(str(path))  # type: ignore[no-untyped-call]
    for each in gone:
        # Killed while it made the file: there is nothing in it.
        with suppress(struct.error, RuntimeError):
            found = MmapedDict.read_all_values_from_file(each)  # type: ignore[no-untyped-call]
            for key, value, *_ in found:
                before, _ = sums.read_value(key)  # type: ignore[no-untyped-call]
                sums.write_value(key, before + value, 0.0)  # type: ignore[no-untyped-call]
        each.unlink()
    sums.close()  # type: ignore[no-untyped-call]


def _warn(sender: Any = None, **_: Any) -> None:
    pool = type(getattr(sender, "pool", None)).__module__
    if _FOLDER not in os.environ and pool.endswith(".prefork"):
        logger.error(
            "metrics: %s is not set, so the counts of this pool's children are not collected. "
            "Set it to an empty folder before the worker starts",
            _FOLDER,
        )


class Gauges:
    """A collector of what Redis tells of all locks of a namespace. Register it in one process."""

    def __init__(self, locks: Any) -> None:
        self._figures = metrics.Figures(locks)

    def describe(self) -> list[Any]:
        """Nothing is read to register it."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges. Without Redis `relock_up` is 0, and the others are missing."""
        found = self._figures.read()
        yield GaugeMetricFamily(
            "relock_up", "Whether the Redis of the locks can be read", int(found is not None)
        )
        yield GaugeMetricFamily(
            "relock_read_seconds", "Seconds that the last look at Redis took", self._figures.took
        )
        if found is None:
            return
        for name, about in metrics.GAUGES.items():
            yield GaugeMetricFamily(metric_name(name), about, found[name])


def serve(locks: Any, port: int, addr: str = "0.0.0.0") -> Any:
    """Serve the gauges over HTTP from a thread of this process. Returns the server.

    Args:
        locks: `celery_relock.admin.Locks`.
    """
    registry = CollectorRegistry()
    registry.register(Gauges(locks))
    return start_http_server(port, addr, registry=registry)[0]
