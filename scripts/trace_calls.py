"""How much of the library one uncontended locked task passes: calls, modules, hops between modules.

    .venv/bin/python scripts/trace_calls.py redis://localhost:6379/0 [--list]

The task runs in Celery's own tracer, as in a worker's child, for the third time: what is made once
in a process has been made.
"""

from __future__ import annotations

import sys
import uuid
from itertools import pairwise
from pathlib import Path

from celery import Celery
from celery.app.trace import build_tracer, setup_worker_optimizations

from celery_relock import LockedTask

PACKAGE = Path(__file__).resolve().parents[1] / "celery_relock"


def main(url: str, shows: bool) -> None:
    app = Celery("traced", broker=url, backend=url)
    app.conf.update(relock_url=url, relock_namespace=f"trace-{uuid.uuid4().hex[:8]}")

    @app.task(base=LockedTask, lock_key="account:{account}", ignore_result=True)
    def charge(account: int) -> None:
        pass

    app.finalize()
    setup_worker_optimizations(app, "traced@localhost")
    trace = build_tracer(charge.name, charge, app=app)

    def execute() -> None:
        sent = app.amqp.create_task_message(str(uuid.uuid4()), charge.name, (42,), {})
        header = {"v": 2, "execution_id": uuid.uuid4().hex[:22]}
        request = {**sent.headers, "relock": header, "delivery_info": {}, "hostname": "traced"}
        trace(request["id"], (42,), {}, request)

    execute()
    execute()
    calls: list[tuple[str, str]] = []

    def note(frame, event, _argument):
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            calls.append((str(file.relative_to(PACKAGE)), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        execute()
    finally:
        sys.setprofile(None)
    if shows:
        for place, name in calls:
            print(f"  {place:34} {name}")
    modules = {place for place, _ in calls}
    hops = sum(one[0] != other[0] for one, other in pairwise(calls))
    print(f"{len(calls)} calls, {len(modules)} modules, {hops} hops between modules")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], "--list" in sys.argv)
