"""A worker as `celery.contrib.testing.worker.start_worker` makes one, with a command line."""

from __future__ import annotations

import argparse
import importlib
import threading

from celery.contrib.testing import worker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-A", dest="module")
    parser.add_argument("-P", dest="pool")
    parser.add_argument("-c", dest="concurrency", type=int)
    parser.add_argument("-n", dest="hostname")
    given, _ = parser.parse_known_args()
    app = importlib.import_module(given.module).app
    options = {"concurrency": given.concurrency, "pool": given.pool}
    worker.anon_nodename = lambda: given.hostname  # that of Celery 5.4 cannot be told a name
    with worker.start_worker(app, loglevel="INFO", perform_ping_check=False, **options):
        print(f"{given.hostname} ready.", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
