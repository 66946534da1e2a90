"""`exporter`."""

from __future__ import annotations

import signal
import threading

import click

from ..errors import LockConfigError
from .base import FOUND, Here, command

# In the range that Prometheus allots to exporters, 9100 to 9999.
PORT = 9540


@command
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="The port; 0 for any free port.",
)
@click.option("--addr", default="0.0.0.0", show_default=True, help="The address to listen on.")
def exporter(here: Here, port: int, addr: str) -> int:
    """Serve the number of held locks, waiting and parked executions to Prometheus.

    Run one exporter for each namespace: it reads all locks whenever it is scraped.
    """
    try:
        from ..contrib import prometheus
    except ImportError as error:
        raise LockConfigError(
            f"the exporter needs an extra: pip install 'celery-relock[prometheus]' ({error})"
        ) from error
    try:
        server = prometheus.serve(here.locks, port, addr)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", error)
        raise LockConfigError(f"cannot listen on {addr}:{port}: {why}") from error
    ended = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: ended.set())
    # `click.echo` flushes, in a pipe too: with port 0 nothing else tells the port.
    host = f"[{addr}]" if ":" in addr else addr
    url = f"http://{host}:{server.server_port}/metrics"
    here.show({"url": url}, [f"serving {url}"])
    ended.wait()
    server.shutdown()
    return FOUND
