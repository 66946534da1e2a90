"""Every promise that a worker's processes could break when other software is in them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from celery import chain

from celery_relock import locked
from tests.company.bench import Bench
from tests.support import wait_for


@pytest.fixture
def processes(bench: Bench) -> None:
    if bench.company.pool != "prefork":
        pytest.skip("needs a child process to kill, or Celery's time limits")


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


def test_a_task_enters_the_lock_that_its_caller_holds(bench: Bench) -> None:
    bench.tasks.outer.delay(bench.key)
    (end,) = bench.wait_for("end")
    assert set(end["fences"].values()) == {end["fences"]["own"]}, end["fences"]
    bench.assert_free(within=2)


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
    (fourth,) = wait_for(lambda: {bench.tasks.once.delay(bench.key).id} - {first}, 5, "a new call")
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
    bench.assert_free(within=2)


@pytest.mark.usefixtures("processes")
def test_the_lock_of_a_killed_child_goes_to_the_next(bench: Bench) -> None:
    bench.hold("die", ())
    successor = bench.tasks.work.delay(bench.key).id
    bench.others_are_served()
    bench.open_gate()
    (end,) = bench.wait_for("end", timeout=10)
    assert end["id"] == successor


def test_a_copy_of_the_message_never_runs_beside_it_nor_after_it(bench: Bench) -> None:
    app = bench.tasks.app
    aside = f"aside-{uuid.uuid4().hex[:8]}"
    ours = bench.tasks.work.apply_async((bench.key, 1), queue=aside).id
    with app.connection_for_write() as connection, app.amqp.producer_pool.acquire() as producer:
        message = connection.SimpleQueue(aside, no_ack=True).get(timeout=5)
        for _ in range(2):
            publish_again(producer, message, app.conf.task_default_queue)
    bench.wait_for("begin")
    bench.others_are_served()
    bench.assert_held()
    bench.open_gate()
    bench.wait_for("end")
    # It has come behind the copy, so the copy is over when it is.
    bench.tasks.work.delay(bench.key)
    bench.assert_one_after_another(2)
    assert [event["id"] for event in bench.events("begin")].count(ours) == 1


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


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("task", "seconds"), [("overlong", 2), ("endless", 5)])
def test_the_lock_is_free_after_a_time_limit(bench: Bench, task: str, seconds: float) -> None:
    getattr(bench.tasks, task).delay(bench.key)
    bench.wait_for("begin")
    bench.assert_held()
    bench.assert_free(within=1 + seconds)  # both limits are one second
    assert not bench.events("end")


def test_a_call_that_has_waited_runs_in_the_context_of_its_sender(bench: Bench) -> None:
    """And not in that of the holder, which made its message come back."""
    bench.hold(headers={"tenant": "T0"})
    sent = [bench.relay("work", headers={"tenant": f"T{number}"}) for number in (1, 2, 3)]
    assert [each["tenant"] for each in sent] == ["T1", "T2", "T3"]
    bench.others_are_served()
    bench.open_gate()
    bench.assert_one_after_another(4)
    begun = bench.events("begin")[1:]
    assert [event["id"] for event in begun] == [each["ids"][0] for each in sent]
    assert [event["tenant"] for event in begun] == ["T1", "T2", "T3"]
    if bench.company.companion.traces:
        assert all(set(each["traces"]) == set(sent[0]["traces"]) for each in sent)
        assert sent[0]["traces"]
        assert [event["traces"] for event in begun] == [each["traces"] for each in sent]
