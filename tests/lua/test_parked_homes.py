"""Who sends parked messages on: only one who can, when it is due at the latest."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import SHARED, Conflict, Ended, Held
from tests.support.simple import granted


@pytest.fixture
def two(desk):
    """r1 holds, r2 is parked for the broker "h"."""
    desk.fence("r1")
    desk.park("r2")
    return desk


def test_who_cannot_send_it_calls_for_one_who_can(two):
    ear = two.listen("parked")

    two.release("r1", home="")

    assert two.out() == []
    assert ear.heard() == ["parked r2 h"]
    assert two.resume() == ["r2"]
    assert two.resume() == []


def test_who_can_send_to_another_broker_does_not_get_it(two):
    two.release("r1", home="other")
    assert two.out() == []

    assert two.resume("other") == []
    assert two.recheck > 1, "no reason to look again at once"
    assert two.resume("h") == ["r2"]


def test_whoever_comes_by_and_can_send_it_gets_what_nobody_could(two):
    two.release("r1", home="")

    two.release("somebody")

    assert (two.out(), two.resume()) == (["r2"], [])


def test_what_was_owed_for_too_long_waits_for_its_turn_again(two):
    two.release("r1", home="")
    two.fence("quick", limit=2)
    two.lapse_place("r2", back=1)

    assert two.resume() == []
    two.release("quick")
    assert two.out() == ["r2"]


def test_what_nobody_could_send_is_promised_and_called_for_again(two):
    ear = two.listen("parked")
    two.release("r1", home="")
    assert isinstance(two.acquire("r3"), Conflict)

    two.lapse_place("r2", back=1)
    two.all_due()
    two.resume("other")

    assert ear.heard() == ["parked r2 h", "parked r2 h"]
    assert two.resume() == ["r2"]


def test_a_waiting_one_behind_a_parked_one_calls_for_its_message(two):
    ear = two.listen("parked")
    two.queue("r3")
    two.lapse("r1")

    two.beat("r3")

    assert ear.heard() == ["parked r2 h"]
    assert two.resume() == ["r2"]


def test_what_was_owed_is_no_longer_when_the_execution_holds_or_parks_again(two):
    two.release("r1", home="")
    two.fence("r2", "back")
    assert two.resume() == []
    two.release("r2", "back")

    two.fence("r1")
    two.park("r4")
    two.release("r1", home="")
    two.fence("quick", limit=2)
    two.park("r4", "back")
    assert two.resume() == []


def test_who_parks_again_for_another_broker_is_owed_one_of_that(two):
    two.release("r1", home="")
    two.fence("quick", limit=2)
    two.park("r2", "back", home="new")

    assert two.resume("h") == []
    two.release("quick", home="")
    assert (two.resume("h"), two.resume("new")) == ([], ["r2"])


def test_a_message_that_was_sent_is_looked_after_when_it_should_have_arrived(two):
    two.release("r1")
    two.resume()

    assert 4 < two.recheck <= 5


def test_the_repeated_look_resumes_the_same_message_for_a_task_that_was_named(two):
    assert two.resume(by="x", tasks=("t-r2",)) == ["r2"]
    assert two.resume(by="x", tasks=("t-r2",)) == ["r2"]
    assert two.resume(by="y", tasks=("t-r2",)) == []


def test_a_task_that_is_named_is_resumed_lock_or_not_until_it_comes(two):
    two.park("r3")
    assert two.resume(tasks=("unknown", "t-r3")) == ["r3"]
    assert two.waiters() == ["r2", "r3"]

    two.lapse_place("r3", back=1)
    two.all_due()
    assert two.resume() == ["r3"]
    assert two.withdraw("r3")
    two.all_due()
    assert two.resume() == []


def test_the_index_of_tasks_has_the_execution_that_was_parked_last(two):
    two.park("retry", task="t-r2")

    assert two.withdraw("r2")

    assert two.resume(tasks=("t-r2",)) == ["retry"]


def test_when_its_time_is_over_an_execution_is_resumed_lock_or_not(desk):
    desk.fence("r1")
    desk.park("r2", patience=4.0)
    assert desk.resume() == []
    assert desk.recheck <= 4.0
    desk.all_due()

    assert desk.resume() == ["r2"]

    assert not isinstance(desk.acquire("r2", "back"), Held)
    desk.lapse_place("r2", back=1)
    desk.all_due()
    assert desk.resume() == ["r2"], "until it leaves"


def test_the_time_of_an_execution_that_parks_again_is_what_it_says_then(desk):
    desk.fence("r1")
    desk.park("r2", patience=0.0)
    assert desk.resume() == ["r2"]

    desk.park("r2", "back")

    desk.all_due()
    assert desk.resume() == []
    assert desk.client.zrange(desk.keys.due(), 0, -1) == [b"l a"]


def test_a_time_that_is_over_while_the_message_is_on_its_way_sends_it_once(desk):
    desk.fence("r1")
    desk.park("r2", patience=100)
    desk.release("r1")
    assert desk.out() == ["r2"]
    desk.all_due()

    assert desk.resume() == []


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_copy_for_a_worker_that_is_gone_ends_and_any_other_message_is_sent_for_ever(
    desk, is_copy
):
    desk.fence("r1")
    desk.park("r2", is_copy=is_copy)
    desk.park("r3")
    desk.release("r1")
    desk.out()
    for _ in range(4):
        desk.lapse_place("r2", back=1)
        desk.all_due()
        assert desk.resume() == ["r2"]

    desk.lapse_place("r2", back=1)
    desk.all_due()

    assert desk.resume() == (["r3"] if is_copy else ["r2"])
    assert desk.waiters() == (["r3"] if is_copy else ["r2", "r3"])


def test_a_copy_that_is_given_up_at_its_deadline_leaves_nothing_to_look_at(desk):
    desk.fence("r1")
    desk.park("r2", is_copy=True, patience=0.0)
    desk.lapse_place("r2", back=1, first=1, sent=5)
    desk.all_due()

    assert desk.resume() == []
    assert desk.recheck is None


def test_who_can_share_the_lock_does_so_when_a_copy_before_it_is_given_up_at_its_deadline(desk):
    inbox = desk.listen("p")
    desk.fence("r1", limit=SHARED)
    desk.park("copy", is_copy=True, patience=30.0)
    desk.queue("waits", limit=SHARED, inbox="p")
    desk.lapse_place("copy", back=1, first=1, sent=5)
    desk.all_due()

    assert desk.resume() == []
    assert granted(inbox.heard()) == ["waits"]


def test_who_stands_behind_a_copy_follows_when_that_is_given_up_by_who_could_send_it(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.park("copy", is_copy=True)
    desk.queue("waits", inbox="p")
    desk.release("r1", home="")
    desk.lapse_place("copy", sent=5)

    assert desk.resume() == []
    assert granted(inbox.heard()) == ["waits"]


def test_a_withdrawn_execution_frees_its_place_and_does_not_run_any_more(two):
    two.park("r3")
    two.release("r1")
    two.out()

    assert two.withdraw("r2")

    assert two.resume() == ["r3"]
    assert isinstance(two.acquire("r2", "late"), Ended)
    assert not two.withdraw("r2")
    assert two.resume() == []


def test_a_withdrawn_execution_whose_message_may_come_again_runs_then(two):
    two.park("r3")
    two.release("r1")
    two.out()

    assert two.withdraw("r2", remember=0)

    assert two.resume() == ["r3"]
    two.fence("r3", "back")
    two.release("r3", "back")
    assert two.fence("r2", "later")


def test_an_attempt_withdraws_what_it_has_parked_itself_or_what_it_came_with(two):
    """Late, perhaps: Redis could not be asked before, or its process was killed."""
    assert two.withdraw("r2", 0, "n")
    two.park("r2", "n")
    two.release("r1")
    assert two.out() == ["r2"]
    assert two.withdraw("r2", 0, "came with it")


def test_an_attempt_does_not_withdraw_what_a_later_one_has_parked(two):
    two.release("r1")
    assert two.out() == ["r2"]
    two.withdraw("r2", 0, "came with it")
    two.fence("r3")
    two.park("r2", "later")  # its message was brought back
    assert not two.withdraw("r2", 0, "came with it")
    two.release("r3")
    assert two.out() == ["r2"]


def test_when_a_message_is_withdrawn_the_waiting_one_behind_it_acquires(two):
    two.listen("p")
    two.release("r1")
    two.queue("r3", inbox="p")

    two.withdraw("r2")

    assert two.holders() == ["r3"]


def test_who_is_not_parked_is_not_withdrawn(two):
    two.queue("r3")

    assert not any(two.withdraw(run) for run in ("r1", "r3", "nobody"))

    assert (two.holders(), two.waiters()) == (["r1"], ["r2", "r3"])
    assert two.client.keys(f"{two.keys.prefix(0)}d:*") == []


def test_withdrawing_from_several_locks_frees_all(desk):
    desk.fence("r1", names=("a",))
    desk.fence("r2", names=("b",))
    desk.park("both", names=("a", "b"))
    desk.park("r3", names=("b",))
    desk.release("r2", names=("b",))
    assert desk.out() == []

    assert desk.withdraw("both")

    assert desk.resume() == ["r3"]
    assert (desk.waiters("a"), desk.waiters("b")) == ([], ["r3"])


def test_an_execution_that_acquires_beside_what_it_found_due_leaves_that_to_others(desk):
    desk.fence("r1", limit=2)
    desk.fence("r2", limit=2)
    desk.park("r3", limit=2)
    desk.lapse("r1")
    desk.lapse("r2")

    assert isinstance(desk.leave("r4", limit=2), Held)

    assert desk.resume() == ["r3"]


def test_a_look_looks_at_so_many_and_then_asks_for_another(two):
    for i in range(150):
        name = f"lock{i}"
        two.fence("h", names=(name,))
        two.park(f"p{i}", names=(name,))
        two.lapse("h", name)
    two.all_due()

    found = two.resume()
    assert two.recheck == 0
    found += two.resume()

    assert sorted(found) == sorted(f"p{i}" for i in range(150))
    assert two.recheck > 0


def test_parked_and_then_nobody_looks_is_never_due_again_once_all_have_left(two):
    two.release("r1")
    two.fence("r2", "back")

    assert two.resume() == []
    assert two.recheck is None


def test_who_can_send_to_several_brokers_gets_all_of_theirs(desk):
    for run, home in (("r2", "h"), ("r3", "other"), ("r4", "third")):
        desk.fence(f"holds-{run}", names=(run,))
        desk.park(run, names=(run,), home=home)
    for run in ("r2", "r3", "r4"):
        desk.release(f"holds-{run}", names=(run,), home="")

    assert desk.resume("h other") == ["r2", "r3"]
    assert desk.recheck > 0, "what is left is another's"
    assert desk.resume("third") == ["r4"]


def test_a_release_resumes_for_each_broker_that_its_process_knows(two):
    two.release("r1", home="other h more")

    assert two.out() == ["r2"]


def test_a_home_is_no_part_of_another_one(two):
    two.release("r1", home="oh hh")

    assert two.out() == []
