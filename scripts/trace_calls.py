"""How much of the library a locked task runs through: calls, modules, hops between modules.

    .venv/bin/python scripts/trace_calls.py [--list]

It starts its own Redis, and runs tasks in Celery's tracer, as a worker's child does. What is not
counted comes first, because it creates what a process creates once. Then a call is sent. Then an
uncontended task. Then a hand-over: a second task is parked while a first task runs, the release of
the first task publishes the second task's message, and the second task runs. There is no worker, so
the work of a worker's main process is missing.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer, setup_worker_optimizations

from celery_relock import LockedTask
from celery_relock.worker.parking import CARRIED, Carried, RawMessage
from tests.support import RedisServer

PACKAGE = Path(__file__).resolve().parents[1] / "celery_relock"


def traced(what: str, call: Callable[[], object], shows: bool) -> None:
    """Call a function, and print which calls of the library it made in this thread."""
    calls: list[tuple[str, str]] = []

    def note(frame: Any, event: str, _argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            calls.append((str(file.relative_to(PACKAGE)), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    modules = {place for place, _ in calls}
    hops = sum(one[0] != other[0] for one, other in pairwise(calls))
    print(
        f"{what:40} {len(calls):4} calls, {len(modules):2} modules, {hops:3} hops between modules"
    )
    if shows:
        for place, name in calls:
            print(f"  {place:34} {name}")


def main(url: str, shows: bool) -> None:
    app = Celery("traced", broker=url, backend=url)
    app.conf.update(relock_url=url, task_ignore_result=True)
    within: list[Callable[[], None]] = []

    @app.task(base=LockedTask, lock_key="account:{account}")
    def charge(account: int) -> None:
        while within:
            within.pop()()

    app.finalize()
    setup_worker_optimizations(app, "traced@localhost")
    trace = build_tracer(charge.name, charge, app=app)

    def received(headers: dict[str, Any] | None = None) -> Callable[[], object]:
        """A message, as a worker's main process hands it on; what executes it."""
        if headers is None:
            headers = app.amqp.create_task_message(
                str(uuid.uuid4()), charge.name, (42,), {}
            ).headers
            headers["relock"] = {"v": 2, "execution_id": uuid.uuid4().hex[:22]}
        raw = RawMessage(b"[[42], {}, {}]", "application/json", "utf-8", headers, {}, "", "celery")
        more = {"delivery_info": {"routing_key": "celery"}, "hostname": "traced"}
        more |= {"properties": {CARRIED: Carried(raw)}}
        return partial(trace, headers["id"], (42,), {}, {**headers, **more})

    def resumed() -> dict[str, Any]:
        with app.connection_for_read() as connection:
            message = connection.SimpleQueue("celery").get(timeout=10)
            message.ack()
            return dict(message.headers)

    def is_parked() -> None:
        waiter = Thread(target=traced, args=("a task that is parked", received(), shows))
        waiter.start()
        waiter.join()

    charge.delay(1)
    traced("a call that is sent", partial(charge.delay, 1), shows)
    app.control.purge()
    received()()
    received()()
    traced("an uncontended task", received(), shows)
    within.append(is_parked)
    traced("the holder, which publishes it again", received(), shows)
    traced("the task that was parked, when it runs", received(resumed()), shows)


if __name__ == "__main__":
    server = RedisServer()
    try:
        main(server.url, "--list" in sys.argv)
    finally:
        server.stop()
