"""What users of such libraries run into: each a function that raises Defect where it happens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from celery import chain, chord
from kombu import Connection

from tests.peers.bench import Bench, Defect

Scenario = Callable[[Bench], None]
SCENARIOS: dict[str, Scenario] = {}


def _scenario(title: str) -> Callable[[Scenario], Scenario]:
    def keep(scenario: Scenario) -> Scenario:
        SCENARIOS[title] = scenario
        return scenario

    return keep


def _ends(title: str, how: str, **options: float) -> None:
    """A run that ends in this way, and then the same call again."""

    @_scenario(title)
    def scenario(bench: Bench) -> None:
        name = bench.name(how)
        bench.send(bench.m.task, name, **options)
        bench.began(name)
        bench.accepts(bench.m.task, name)


def _never_begins(title: str, **options: float) -> None:
    @_scenario(title)
    def scenario(bench: Bench) -> None:
        name = bench.name()
        sent = bench.send(bench.m.task, name, countdown=1, **options)
        if not options:
            sent.revoke()
        bench.see(lambda: sent.state == "REVOKED", 15, "not revoked")
        bench.accepts(bench.m.task, name)


@_scenario("the same call twice is one execution")
def twice(bench: Bench) -> None:
    def try_it() -> float:
        name = bench.name("sleep 1")
        started = time.monotonic()
        for _ in range(2):
            bench.send(bench.m.task, name)
        slow = time.monotonic() - started
        bench.ended(name)
        time.sleep(0.5)
        if len(bench.events(name)) != 1:
            raise Defect(f"{len(bench.events(name))} executions")
        return slow

    if (slow := _at_best(try_it, 0.5)) > 0.5:
        raise Defect(f"the sender waits {slow:.1f} s")


def _at_best(try_it: Callable[[], float], enough: float) -> float:
    """The least of up to three times, in seconds: a machine may be busy."""
    least = try_it()
    for _ in range(2):
        if least > enough:
            least = min(least, try_it())
    return least


@_scenario("a call costs no extra time")
def overhead(bench: Bench) -> None:
    def try_it() -> float:
        name, sent = bench.name(), time.monotonic()
        bench.send(bench.m.task, name).get(timeout=20)
        return time.monotonic() - sent

    if (took := _at_best(try_it, 0.6)) > 0.6:
        raise Defect(f"{took:.1f} s for an empty task")


@_scenario("f(x), f(name=x), f(x, default) are one call")
def spellings(bench: Bench) -> None:
    name, task = bench.name("sleep 1.5"), bench.m.task
    for args, kwargs in (((name,), {}), ((), {"name": name}), ((name, 0), {})):
        try:
            task.apply_async(args, kwargs)
        except Exception:
            continue
    bench.ended(name)
    time.sleep(0.5)
    if len(bench.events(name)) != 1:
        raise Defect(f"{len(bench.events(name))} executions")


@_scenario("kill -9 of the task's process")
def kill(bench: Bench) -> None:
    name = bench.name("sleep 30")
    bench.send(bench.m.task, name)
    [began] = bench.began(name)
    os.kill(began.pid, signal.SIGKILL)
    bench.accepts(bench.m.task, name)


@_scenario("kill -9, acks_late: runs again")
def kill_late(bench: Bench) -> None:
    name = bench.name("first 30")
    bench.send(bench.m.late, name)
    [began] = bench.began(name)
    os.kill(began.pid, signal.SIGKILL)
    bench.began(name, 2)
    bench.ended(name)
    bench.accepts(bench.m.late, name)


def _restarts(title: str, sig: int, children: bool = False) -> None:
    @_scenario(title)
    def scenario(bench: Bench) -> None:
        warm = sig == signal.SIGTERM
        name = bench.name("sleep 1" if warm else "sleep 30")
        bench.send(bench.m.task, name)
        bench.began(name)
        bench.restart(sig, children=children)
        bench.accepts(bench.m.task, name)


_restarts("kill -9 of the whole worker, and a restart", signal.SIGKILL, children=True)
_restarts("SIGQUIT, and a restart", signal.SIGQUIT)
_restarts("SIGTERM, and a restart", signal.SIGTERM)


@_scenario("a task longer than the lock's time to live")
def outlives(bench: Bench) -> None:
    name = bench.name("sleep 5")
    bench.send(bench.m.short, name)
    bench.began(name)
    time.sleep(3.6)
    bench.send(bench.m.short, name)
    bench.ended(name)
    time.sleep(0.5)
    bench.alone(name)


@_scenario("the broker delivers a running task again")
def redelivered(bench: Bench) -> None:
    name = bench.name("sleep 2")
    sent = bench.send(bench.m.task, name)
    bench.began(name)
    # As the broker does it: the same message, with the same id and headers.
    task, app = bench.m.task, bench.m.app
    message = app.amqp.create_task_message(sent.id, task.name, (name,), {})
    with app.producer_pool.acquire() as producer:
        producer.publish(
            message.body,
            headers={**message.headers, **bench.header(sent.id)},
            routing_key=app.conf.task_default_queue,
            serializer="json",
            **message.properties,
        )
    bench.ended(name)
    time.sleep(0.5)
    bench.alone(name)


@_scenario("a countdown longer than the lock's time to live")
def countdown(bench: Bench) -> None:
    name = bench.name()
    bench.send(bench.m.short, name, countdown=4.5)
    time.sleep(3.5)
    bench.send(bench.m.short, name, countdown=1)
    bench.ended(name)
    time.sleep(1.5)
    if len(bench.events(name)) != 1:
        raise Defect(f"{len(bench.events(name))} executions")


@_scenario("self.retry() twice is three executions")
def retries(bench: Bench) -> None:
    name = bench.name("retry")
    result = bench.send(bench.m.task, name)
    bench.began(name, 3, 8)
    result.get(timeout=20)
    bench.accepts(bench.m.task, name)


_ends("the hard time limit", "sleep 30", time_limit=1)
_ends("the soft time limit", "sleep 30", soft_time_limit=1)
_never_begins("revoked while it is queued")


@_scenario("revoked with terminate=True")
def terminated(bench: Bench) -> None:
    name = bench.name("sleep 30")
    sent = bench.send(bench.m.task, name)
    bench.began(name)
    sent.revoke(terminate=True)
    bench.accepts(bench.m.task, name)


_never_begins("expired", expires=0.5)
_ends("the body raises", "raise")
_ends("the body raises Ignore", "ignore")
_ends("the body calls self.replace()", "replace")


@_scenario("a chain whose second step is queued already")
def busy_chain(bench: Bench) -> None:
    m, name = bench.m, bench.name("sleep 1.5")
    bench.send(m.task, name)
    bench.began(name)
    steps = chain(m.plain.si("first"), m.task.si(name), m.plain.si("last")).apply_async()
    if _value(steps) != "last":
        raise Defect(f"the rest never runs: {steps.state}")
    bench.alone(name)


@_scenario("a chain with the same step twice")
def same_step(bench: Bench) -> None:
    m, name = bench.m, bench.name()
    steps = chain(m.task.si(name), m.task.si(name), m.plain.si("last")).apply_async()
    if _value(steps) != "last":
        raise Defect(f"the rest never runs: {steps.state}")
    bench.accepts(m.task, name)


@_scenario("a chord with the same member twice")
def same_member(bench: Bench) -> None:
    m, name = bench.m, bench.name("sleep 0.3")
    try:
        body = chord([m.task.si(name), m.task.si(name)], m.total.s()).apply_async()
    except Exception as error:
        raise Defect(f"the call raises {type(error).__name__}") from error
    if _value(body) != 2:
        raise Defect(f"the body never runs: {body.state}")


def _value(result: object) -> object:
    try:
        return result.get(timeout=8)  # type: ignore[attr-defined]
    except Exception as error:
        return error


@_scenario("send_task twice")
def by_name(bench: Bench) -> None:
    name, app = bench.name("sleep 1"), bench.m.app
    for _ in range(2):
        app.send_task(bench.m.task.name, (name,), queue=app.conf.task_default_queue)
    bench.ended(name)
    time.sleep(1.5)
    bench.alone(name)


@_scenario("send_task of what runs already")
def twin(bench: Bench) -> None:
    name, app = bench.name("sleep 3"), bench.m.app
    bench.send(bench.m.task, name)
    bench.began(name)
    app.send_task(bench.m.task.name, (name,), queue=app.conf.task_default_queue)
    time.sleep(1.5)
    bench.alone(name)
    bench.send(bench.m.task, name)  # the first one still counts
    bench.ended(name)
    time.sleep(0.5)
    bench.alone(name)
    if len(bench.events(name)) != 1:
        raise Defect("the refused one frees the lock")


@_scenario("a direct call, and then delay()")
def direct(bench: Bench) -> None:
    name = bench.name()
    bench.m.task(name)
    bench.accepts(bench.m.task, name)


@_scenario("the broker is down when it is sent")
def no_broker(bench: Bench) -> None:
    name = bench.name()
    with Connection("redis://127.0.0.1:1/0", transport_options={"max_retries": 0}) as nowhere:
        bench.send(bench.m.task, name, connection=nowhere, retry=False)
    bench.accepts(bench.m.task, name)


@_scenario("autoretry_for, and duplicates are errors")
def error_crosses(bench: Bench) -> None:
    name = bench.name("fail")
    bench.send(bench.m.strict, name)
    bench.began(name)
    time.sleep(1)
    if _value(bench.m.plain.delay("alive")) != "alive":
        raise Defect("the worker hangs")
    bench.began(name, 2, 5)
    bench.accepts(bench.m.strict, name)
