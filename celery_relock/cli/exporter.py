"""`exporter`."""

from __future__ import annotations

import signal
import threading

import click

from ..errors import LockConfigError
from .base import FOUND, Here, command

# Of Prometheus' own list the range for exporters is 9100 to 9999.
PORT = 9540


@command
@click.option("--port", default=PORT, show_default=True, help="To listen at; 0 for any free one.")
@click.option("--addr", default="0.0.0.0", show_default=True, help="The address to listen at.")
def exporter(here: Here, port: int, addr: str) -> int:
    """Serve the number of held locks, waiting and parked executions to Prometheus.

    One for each namespace: it looks at all locks whenever it is scraped.
    """
    try:
        from ..contrib import prometheus
    except ImportError as error:
        raise LockConfigError(
            f"the exporter needs an extra: pip install 'celery-relock[prometheus]' ({error})"
        ) from error
    ended = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: ended.set())
    try:
        server = prometheus.serve(here.locks, port, addr)
    except OSError as error:
        raise LockConfigError(f"cannot listen at {addr}:{port}: {error.strerror}") from error
    # At once, also in a pipe: with port 0 only this says where.
    click.echo(f"serving http://{addr}:{server.server_port}/metrics")
    ended.wait()
    server.shutdown()
    return FOUND
