"""Every promise that a worker's processes could break when other software is in them."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from celery import chain

from celery_relock import locked
from tests.company.bench import Bench
from tests.support import wait_for
from tests.support.journal import Event
from tests.support.worker import ROOT


def test_the_companion_is_really_there(bench: Bench) -> None:
    bench.tasks.free.delay(bench.key)
    (end,) = bench.wait_for("end")
    assert set(end["seen"]) == set(bench.company.companion.instruments)
    assert all(end["seen"].values()), end["seen"]


def test_the_companion_sees_a_locked_task(bench: Bench) -> None:
    bench.tasks.look.delay(bench.key)
    (end,) = bench.wait_for("end")
    assert all(end["seen"].values()), end["seen"]


def test_the_body_sees_its_lock(bench: Bench) -> None:
    bench.tasks.look.delay(bench.key)
    bench.tasks.look.delay(bench.key)
    first, second = (end["lock"] for end in bench.wait_for("end", 2))
    for name, fence, owner in (first, second):
        assert name == bench.key
        assert fence > 0
        assert owner
    assert first[1] < second[1]
    assert first[2] != second[2]


def test_calls_of_one_key_come_one_after_another_and_others_beside_them(bench: Bench) -> None:
    others = [f"{bench.key}-{n}" for n in range(4)]
    for key in [bench.key] * 4 + others:
        bench.tasks.work.delay(key, seconds=0.05)
    bench.assert_one_after_another(4)
    for other in others:
        bench.wait_for("end", key=other)


def test_a_task_re_enters_the_lock_that_its_caller_holds(bench: Bench) -> None:
    bench.tasks.outer.delay(bench.key)
    (end,) = bench.wait_for("end")
    assert set(end["fences"].values()) == {end["fences"]["own"]}, end["fences"]
    bench.assert_free(within=20)


def test_calls_that_wait_take_no_slot_and_run_afterwards(bench: Bench) -> None:
    first = bench.hold()
    waiting = [bench.tasks.work.delay(bench.key).id for _ in range(3)]
    bench.others_are_served()
    bench.assert_held()
    bench.open_gate()
    bench.assert_one_after_another(4)
    assert [event["id"] for event in bench.events("begin")] == [first, *waiting]


def test_a_duplicate_call_is_not_sent_until_the_first_one_has_ended(bench: Bench) -> None:
    first, second = bench.relay("once", times=2)["ids"]
    bench.wait_for("begin")
    bench.assert_held()
    (third,) = bench.relay("once")["ids"]
    assert first == second == third
    bench.open_gate()
    bench.wait_for("end")
    # Once it has ended the next call is one of its own.
    (fourth,) = wait_for(
        lambda: {bench.tasks.once.delay(bench.key).id} - {first}, what="a new call"
    )
    bench.assert_one_after_another(2)
    assert [event["id"] for event in bench.events("begin")] == [first, fourth]


def test_a_workflow_lock_is_free_right_after_the_last_step(bench: Bench) -> None:
    tasks = bench.tasks
    steps = [
        tasks.plain_step.si(bench.key, 1),
        tasks.locked_step.si(bench.key, 2),
        tasks.plain_step.si(bench.key, 3),
        tasks.locked_step.si(bench.key, 4),
    ]
    locked(chain(*steps), key=bench.key).delay()
    bench.wait_for("step 1")
    bench.assert_held()
    stranger = tasks.work.delay(bench.key).id
    bench.others_are_served()
    bench.open_gate()
    ends = bench.wait_for("end", 5)
    assert [end.data.get("of") for end in ends] == ["workflow"] * 4 + [None]
    assert ends[-1]["id"] == stranger
    fences = [bench.events(f"step {number}")[0]["fence"] for number in (2, 4)]
    assert len(set(fences)) == 1
    bench.assert_free(within=20)


@pytest.mark.processes
def test_the_lock_of_a_killed_child_goes_to_the_next(bench: Bench) -> None:
    bench.hold("die", ())
    successor = bench.tasks.work.delay(bench.key).id
    bench.others_are_served()
    bench.open_gate()
    (end,) = bench.wait_for("end", timeout=30)
    assert end["id"] == successor


def test_a_copy_of_the_message_never_runs_beside_it_nor_after_it(bench: Bench) -> None:
    if bench.company.pool == "threads" and "opentelemetry" in bench.company.companion.instruments:
        bench.be_the_last()  # the test below shows why
    ours = send_twice(bench, bench.tasks.work, 1)
    bench.wait_for("begin")
    bench.others_are_served()
    bench.assert_held()
    bench.open_gate()
    bench.wait_for("end")
    # It has come behind the copy, so the copy is over when it is.
    bench.tasks.work.delay(bench.key)
    bench.assert_one_after_another(2)
    assert [event["id"] for event in bench.events("begin")].count(ours) == 1


@pytest.mark.beside("opentelemetry")
@pytest.mark.threads
def test_two_deliveries_of_a_plain_task_at_once_mix_up_the_traces_of_a_thread(bench: Bench) -> None:
    """What docs/company.md says of OpenTelemetry in threads happens without any lock. When this
    fails, it is mended there: the page, and `be_the_last` above, can go."""
    bench.be_the_last()
    send_twice(bench, bench.tasks.plain_work)
    bench.wait_for("begin", 2)
    bench.open_gate()
    bench.wait_for("end", 2)
    traces = []
    for key in (f"{bench.key}-1", f"{bench.key}-2"):  # each of the two threads runs one of either
        for _ in range(2):
            bench.tasks.plain_work.delay(key)
        begun = bench.wait_for("begin", 2, key=key)
        traces += [event["traces"]["opentelemetry"] for event in begun]
        bench.worker.journal.add("gate", key=key)
        bench.wait_for("end", 2, key=key)
    assert len(set(traces)) < 4, "no two of four tasks that were sent without a trace share one"


def send_twice(bench: Bench, task: Any, *arguments: Any) -> str:
    """Send a task and let the broker deliver its message two times; the task's id."""
    app = bench.tasks.app
    aside = f"aside-{uuid.uuid4().hex[:8]}"
    task_id = task.apply_async((bench.key, *arguments), queue=aside).id
    with app.connection_for_write() as connection, app.amqp.producer_pool.acquire() as producer:
        message = connection.SimpleQueue(aside, no_ack=True).get(timeout=30)
        for _ in range(2):
            publish_again(producer, message, app.conf.task_default_queue)
    return str(task_id)


def publish_again(producer: Any, message: Any, queue: str) -> None:
    known = ("correlation_id", "reply_to", "priority", "delivery_mode")
    properties = {name: message.properties[name] for name in known if name in message.properties}
    producer.publish(
        message.body,
        exchange="",
        routing_key=queue,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        headers=message.headers,
        **properties,
    )


@pytest.mark.processes
@pytest.mark.parametrize(("task", "seconds"), [("overlong", 2), ("endless", 5)])
def test_the_lock_is_free_after_a_time_limit(bench: Bench, task: str, seconds: float) -> None:
    getattr(bench.tasks, task).delay(bench.key)
    bench.wait_for("begin")
    bench.assert_held()
    bench.assert_free(within=20 + seconds)  # both limits are one second
    assert not bench.events("end")


def test_a_call_that_has_waited_runs_as_the_tenant_of_its_sender(bench: Bench) -> None:
    """And not as that of the holder, which makes its message come back."""
    bench.hold(headers={"tenant": "T0"})
    sent = [bench.relay("work", headers={"tenant": f"T{number}"}) for number in (1, 2, 3)]
    assert [each["tenant"] for each in sent] == ["T1", "T2", "T3"]
    assert [event["tenant"] for event in those_that_waited(bench, sent)] == ["T1", "T2", "T3"]


@pytest.mark.traces
def test_a_call_continues_the_trace_of_its_sender(bench: Bench) -> None:
    carried = bench.carried()
    if len(bench.company.companion.instruments) == 1:  # together they take each other's headers
        assert carried == set(bench.company.companion.instruments)
    sent = bench.relay("work")
    (begun,) = bench.wait_for("begin")
    assert traces_of([begun], carried) == traces_of([sent], carried)


@pytest.mark.traces
def test_a_call_that_has_waited_continues_the_trace_of_its_sender(bench: Bench) -> None:
    carried = bench.carried()
    bench.hold()
    sent = [bench.relay("work") for _ in range(3)]
    begun = those_that_waited(bench, sent)
    assert traces_of(begun, carried) == traces_of(sent, carried)
    for companion in carried:
        assert len({event["traces"][companion] for event in begun}) == 3, "one trace for three"


@pytest.mark.traces
def test_a_call_without_a_trace_that_has_waited_gets_none_from_the_holder(bench: Bench) -> None:
    """As beat or a script sends it. New Relic adds its headers to whatever a task publishes."""
    begun = []
    for _ in range(3):  # without a lock: whose traces does each companion begin anew?
        begun += bench.wait_for("begin", key=bench.send_free())
    anew = {
        name
        for name in bench.company.companion.instruments
        if len({event["traces"].get(name) for event in begun}) == 3
    }
    bench.hold()
    sent = [bench.tasks.work.delay(bench.key).id for _ in range(3)]
    bench.others_are_served()
    bench.open_gate()
    bench.assert_one_after_another(4)
    every = bench.events("begin")
    assert [event["id"] for event in every[1:]] == sent
    shared = {name for name in anew if len({event["traces"].get(name) for event in every}) < 4}
    assert not shared


def traces_of(events: list[Event], companions: set[str]) -> list[dict[str, str]]:
    return [{name: event["traces"].get(name) for name in companions} for event in events]


def those_that_waited(bench: Bench, sent: list[Event]) -> list[Event]:
    """The begins of what was sent behind the holder at the gate."""
    bench.others_are_served()
    bench.open_gate()
    bench.assert_one_after_another(1 + len(sent))
    begun = bench.events("begin")[1:]
    assert [event["id"] for event in begun] == [each["ids"][0] for each in sent]
    return begun


@pytest.mark.beside("sentry", "all tracers")
def test_a_call_that_has_to_wait_is_no_error(bench: Bench) -> None:
    bench.hold()
    bench.tasks.work.delay(bench.key)
    bench.others_are_served()
    bench.open_gate()
    bench.assert_one_after_another(2)
    bench.tasks.fail.delay(bench.key)
    (error,) = bench.wait_for("reported")
    assert "on purpose" in error["error"]


@pytest.mark.beside("nobody", "sentry", "all tracers", "django")
def test_what_beat_sends_waits_its_turn(bench: Bench) -> None:
    beat = bench.start_beat()
    bench.wait_for("begin", timeout=60)
    bench.assert_held()
    wait_for(lambda: beat.log().count("Sending due task") >= 4, what="four ticks")
    beat.close()
    bench.others_are_served()
    # In line behind all ticks. How many these are, only the worker knows: beat was killed.
    last = bench.tasks.work.delay(bench.key).id
    bench.open_gate()
    wait_for(lambda: bench.events("end") and bench.events("end")[-1]["id"] == last, what="all")
    ticks = len(bench.events("end")) - 1
    assert ticks >= 3
    bench.assert_one_after_another(ticks + 1)
    if "sentry" in bench.company.companion.instruments:
        assert_checked_in(bench, ticks)


def assert_checked_in(bench: Bench, ticks: int) -> None:
    """One check-in for each run: beat says that it has begun, the worker that it has ended."""

    def ended() -> list[str]:
        every = bench.events("check-in")
        return [event["check_in"] for event in every if event["status"] == "ok"]

    wait_for(lambda: len(ended()) >= ticks, what="the check-ins")
    assert len(ended()) == len(set(ended())) == ticks
    every = bench.events("check-in")
    assert set(ended()) <= {each["check_in"] for each in every if each["status"] == "in_progress"}


@pytest.mark.beside("django")
def test_the_results_are_in_the_database(bench: Bench) -> None:
    """That of a task that has waited is its own in the end, whatever was shown meanwhile."""
    first = bench.hold()
    second = bench.tasks.work.delay(bench.key).id
    bench.others_are_served()
    assert bench.company.result_state(second) not in ("SUCCESS", "FAILURE")
    bench.open_gate()
    bench.assert_one_after_another(2)
    for each in (first, second):
        wait_for(lambda each=each: bench.company.result_state(each) == "SUCCESS", what=each)


@pytest.mark.beside("flower")
def test_flower_shows_a_task_that_waits_as_blocked_and_then_as_any_other(bench: Bench) -> None:
    flower = bench.start_flower()

    def shows(task_id: str, state: str) -> None:
        wait_for(lambda: flower.state(task_id) == state, what=f"{state} in Flower")

    with bench.lock():
        task_id = bench.tasks.work.delay(bench.key, 1).id
        shows(task_id, "BLOCKED")
    bench.wait_for("begin")
    shows(task_id, "STARTED")
    bench.open_gate()
    bench.wait_for("end")
    shows(task_id, "SUCCESS")


@pytest.mark.beside("celery.contrib")
def test_the_fixtures_of_celerys_pytest_plugin_run_locked_tasks(bench: Bench) -> None:
    """`celery_app` and `celery_worker`, in a pytest of their own."""
    case = Path(__file__).parent / "inner" / "case.py"
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull]
    command += ["-p", "celery.contrib.pytest", "-p", "no:ddtrace", "-p", "no:cacheprovider"]
    names = {"RELOCK_TEST_URL": bench.company.url, "RELOCK_TEST_NAMESPACE": bench.key}
    done = subprocess.run(
        [*command, str(case)],
        env={**os.environ, **names},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stdout + done.stderr
