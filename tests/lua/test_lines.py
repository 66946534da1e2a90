"""A line: calls get their turns in the order in which they took their places, whenever their
messages come (`lock_order`)."""

from __future__ import annotations

from typing import Any

import pytest

from celery_relock.engine.protocol import (
    COMES_AGAIN,
    KEPT,
    LINE,
    Claim,
    Conflict,
    Ended,
    Held,
    Parked,
    PlaceRequest,
    Queued,
    Release,
    Successor,
)
from tests.support.desk import Desk

A = (f"{LINE}a",)
GAP, DAY = 1000.0, 86400.0


def place(desk: Desk, run: str, **more: Any) -> int:
    """A call is about to be sent."""
    facts = {"gap": GAP, "delay": 0.0, "moment": 0.0, "life": 100000.0, **more}
    return desk.backend.place(PlaceRequest(A[0], run, owner(run), f"call[{run}] here", **facts))


def owner(run: str, again: bool = False) -> str:
    """Of a claim to the line: its task. `r1-retry` is of the task of `r1`."""
    return f"{COMES_AGAIN if again else ''}t-{run.partition('-')[0]}"


def arrive(desk: Desk, run: str, attempt_id: str = "n", *, again: bool = False) -> Any:
    """Its message comes to a worker: the ticket by which it gets the line, or what is said."""
    answer = desk.acquire(run, attempt_id, names=A, owner=owner(run, again))
    return answer.fences[0] if isinstance(answer, Held) else answer


def park(desk: Desk, run: str, attempt_id: str = "n", *, again: bool = False) -> None:
    """It comes early."""
    assert isinstance(arrive(desk, run, attempt_id, again=again), Conflict)
    desk.park(run, attempt_id, names=A, owner=owner(run, again))


def end(desk: Desk, run: str, attempt_id: str = "n") -> list[str]:
    """It has run: whose messages are resumed."""
    desk.release(run, attempt_id, names=A, ended="execution")
    return desk.out()


def passed(desk: Desk) -> list[str]:
    desk.all_due()
    found = desk.backend.resume("h", "by", ())
    desk._out += found.messages
    return [call.execution_id for call in found.passed]


def marker(run: str, lease: float = 60.0) -> Claim:
    """The dedup marker of a call."""
    return Claim(f"m-{run}", KEPT, f"m-{run}", ("dedup\tt\ta",), (1,), lease, f"task-{run}")


@pytest.fixture
def line(desk: Desk) -> list[int]:
    """Three calls were sent."""
    return [place(desk, run) for run in ("r1", "r2", "r3")]


def test_tickets_rise_in_the_order_in_which_calls_are_sent(line):
    assert line == sorted(set(line))


def test_a_place_that_is_asked_for_twice_is_one_place(desk, line):
    assert place(desk, "r2") == line[1]
    assert desk.waiters(A[0]) == ["r1", "r2", "r3"]


def test_a_late_copy_of_the_command_leaves_the_place_that_its_message_got_without_it(desk, line):
    arrive(desk, "r1")
    park(desk, "r9")
    place(desk, "r9")  # the sender heard no answer, and sent the call without a place
    for run in ("r1", "r2"):
        assert end(desk, run) == []
        arrive(desk, {"r1": "r2", "r2": "r3"}[run])
    assert end(desk, "r3") == ["r9"]
    assert arrive(desk, "r9", "n2")


def test_a_late_copy_of_the_command_takes_no_place_while_its_call_runs(desk, line):
    arrive(desk, "r1")
    assert place(desk, "r1") == 0
    desk.release("r1", names=A, ended="killed")
    assert desk.waiters(A[0]) == ["r2", "r3"]


def test_a_late_copy_takes_a_place_if_the_call_has_lost_the_line(desk, line):
    arrive(desk, "r1")
    desk.lapse("r1", A[0])
    assert place(desk, "r1") > line[2]
    assert desk.waiters(A[0]) == ["r2", "r3", "r1"]


def test_a_call_gets_its_marker_together_with_its_place(desk):
    ticket = place(desk, "r1", marker=marker("r1"))
    assert place(desk, "r1", marker=marker("r1")) == ticket
    (hold,) = desk.backend.inspect("dedup\tt\ta").holds
    assert 59 < hold.remaining <= 60
    desk.backend.force_release("dedup\tt\ta")
    desk.backend.acquire(marker("r1"))
    (alone,) = desk.backend.inspect("dedup\tt\ta").holds
    assert hold._replace(remaining=0.0, fence=0) == alone._replace(remaining=0.0, fence=0)


def test_a_duplicate_takes_no_place_and_hears_whose_it_is(desk):
    place(desk, "r1", marker=marker("r1"))
    there = place(desk, "r2", marker=marker("r2"))
    as_acquired = desk.backend.acquire(marker("r2"))
    assert there._replace(remaining=0.0) == as_acquired._replace(remaining=0.0)
    assert (there.label, there.owner) == ("task-r1", "m-r1")
    assert desk.waiters(A[0]) == ["r1"]


def test_a_marker_that_lapsed_makes_no_duplicate(desk):
    place(desk, "r1", marker=marker("r1", 0.05))
    desk.wait_ms(60)
    assert place(desk, "r2", marker=marker("r2")) > 0


def test_a_call_whose_marker_is_there_already_gets_its_place(desk):
    fence = desk.backend.acquire(marker("r1")).fences[0]
    assert place(desk, "r1", marker=marker("r1")) > 0
    assert [hold.fence for hold in desk.backend.inspect("dedup\tt\ta").holds] == [fence]


def test_a_call_that_has_ended_gets_no_marker(desk):
    place(desk, "r1")
    desk.withdraw("r1")
    assert place(desk, "r1", marker=marker("r1")) == 0
    assert desk.backend.inspect("dedup\tt\ta").holds == ()


def test_calls_that_arrive_in_order_get_the_line_by_their_tickets(desk, line):
    for run, ticket in zip(("r1", "r2", "r3"), line, strict=True):
        assert arrive(desk, run) == ticket
        assert end(desk, run) == []


def test_calls_that_arrive_early_are_parked_and_resumed_in_order(desk, line):
    park(desk, "r3")
    park(desk, "r2")
    assert desk.out() == []
    assert arrive(desk, "r1") == line[0]
    assert end(desk, "r1") == ["r2"]
    assert arrive(desk, "r2", "n2") == line[1]
    assert end(desk, "r2", "n2") == ["r3"]
    assert arrive(desk, "r3", "n2") == line[2]


def test_nobody_overtakes_a_message_that_was_resumed(desk, line):
    park(desk, "r2")
    arrive(desk, "r1")
    assert end(desk, "r1") == ["r2"]
    desk.lapse_place("r2", A[0], first=1, back=1)
    assert isinstance(arrive(desk, "r3"), Conflict)


def test_a_later_call_waits_for_a_late_one_no_longer_than_its_gap(desk, line):
    park(desk, "r2")
    assert passed(desk) == []
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1"]
    assert desk.out() == ["r2"]
    assert passed(desk) == []


def test_messages_that_are_missing_side_by_side_wait_for_one_gap(desk, line):
    place(desk, "r4")
    park(desk, "r4")
    assert passed(desk) == []
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1", "r2", "r3"]
    assert desk.out() == ["r4"]


def test_messages_that_got_lost_while_a_call_ran_wait_for_one_gap(desk, line):
    arrive(desk, "r1")
    place(desk, "r4")
    park(desk, "r4")
    assert end(desk, "r1") == []
    desk.age_call("r2", A[0])
    assert passed(desk) == ["r2", "r3"]
    assert desk.out() == ["r4"]


def test_messages_that_are_missing_side_by_side_wait_for_one_gap_behind_a_call_without_a_place(
    desk, line
):
    park(desk, "r9")
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1", "r2", "r3"]
    assert desk.out() == ["r9"]


def test_messages_that_are_missing_wait_for_one_gap_after_the_clock_was_set_back(desk):
    desk.fence("r0", names=("z",))
    desk.client.hset(desk.keys.meta(), "fence", 4_000_000_000_000_000)
    for run in ("r1", "r2", "r3"):
        place(desk, run)
    park(desk, "r9")
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1", "r2", "r3"]


def test_a_long_row_of_messages_that_are_missing_waits_for_one_gap(desk):
    missing = [f"r{number}" for number in range(300)]
    for run in [*missing, "last"]:
        place(desk, run)
    park(desk, "last")
    desk.age_call("r0", A[0])
    assert [*passed(desk), *passed(desk), *passed(desk)] == missing
    assert desk.waiters(A[0]) == ["last"]


def test_the_gap_of_the_next_counts_anew_if_only_calls_before_it_had_come(desk, line):
    place(desk, "r4")
    park(desk, "r2")
    park(desk, "r4")
    desk.withdraw("r2")
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1"], "r4 came later than r2"
    desk.age_call("r3", A[0])
    assert passed(desk) == ["r3"]
    assert desk.out() == ["r4"]


def test_the_gap_of_the_next_counts_anew_if_only_calls_before_it_had_come_while_another_ran(
    desk, line
):
    for run in ("r4", "r5"):
        place(desk, run)
    arrive(desk, "r1")
    park(desk, "r3")
    assert end(desk, "r1") == []
    park(desk, "r5")
    desk.withdraw("r3")
    desk.age_call("r2", A[0])
    assert passed(desk) == ["r2"], "r5 came later than r3"
    desk.age_call("r4", A[0])
    assert passed(desk) == ["r4"]


def test_a_message_that_came_and_is_sent_again_has_a_gap_of_its_own(desk, line):
    """It is too large to be parked."""
    park(desk, "r3")
    assert isinstance(arrive(desk, "r2"), Conflict)
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1"]
    assert arrive(desk, "r2", "n2") == line[1]


def test_the_next_is_not_late_before_it_is_due_though_the_one_before_it_is(desk):
    place(desk, "r1")
    place(desk, "r2", delay=1000.0)
    place(desk, "r3", delay=2000.0)
    park(desk, "r3")
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1"]
    assert desk.waiters(A[0]) == ["r2", "r3"]


def test_the_next_is_late_by_its_own_gap(desk):
    place(desk, "r1")
    place(desk, "r2", gap=1e10)
    place(desk, "r3")
    park(desk, "r3")
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1"]
    assert desk.waiters(A[0]) == ["r2", "r3"]


def test_a_retry_behind_a_missing_message_has_a_gap_of_its_own(desk):
    """A worker whose clock is ahead runs a call before it is due, and others are sent meanwhile."""
    ticket = place(desk, "r1", delay=20.0)
    arrive(desk, "r1")
    place(desk, "r2")
    leave_to(desk, "r1", "r1-retry")
    place(desk, "r3", delay=30.0)
    park(desk, "r3")
    desk.age_call("r2", A[0])
    assert passed(desk) == ["r2"]
    assert arrive(desk, "r1-retry") == ticket


def test_the_gap_counts_from_when_a_later_call_is_here(desk, line):
    desk.age_call("r1", A[0], waited_for=False)
    park(desk, "r2")
    assert passed(desk) == []


@pytest.mark.parametrize("waits", [False, True], ids=["is too large", "waits in its process"])
def test_the_gap_goes_on_while_a_later_call_that_is_not_parked_is_to_come_again(desk, line, waits):
    how = {"names": A, "owner": owner("r3", False), "wait": 60.0 * waits}
    assert isinstance(desk.acquire("r3", "n", **how), Queued if waits else Conflict)
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1", "r2"]


@pytest.mark.parametrize("how", ["withdrawn", "its process has died"])
def test_the_gap_counts_anew_when_the_later_call_is_there_no_more(desk, line, how):
    desk.acquire("r3", names=A, owner=owner("r3", False), wait=60.0)
    desk.age_call("r1", A[0])
    desk.withdraw("r3") if how == "withdrawn" else desk.lapse_place("r3", A[0])
    assert passed(desk) == []
    assert arrive(desk, "r1") == line[0]


def test_a_backlog_that_moves_on_by_itself_passes_nobody_over(desk, line):
    desk.age_call("r1", A[0], waited_for=False)
    assert passed(desk) == []
    assert [arrive(desk, "r1"), end(desk, "r1"), arrive(desk, "r2")] == [line[0], [], line[1]]


def test_a_call_that_comes_after_it_was_passed_over_gets_another_ticket(desk, line):
    park(desk, "r2")
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1"]
    assert desk.out() == ["r2"]
    assert arrive(desk, "r2", "n2") == line[1]
    park(desk, "r1")
    assert end(desk, "r2", "n2") == []
    assert arrive(desk, "r3") == line[2]
    assert end(desk, "r3") == ["r1"]
    assert arrive(desk, "r1", "n2") > line[2]


def test_calls_without_a_place_come_after_those_that_have_one(desk, line):
    park(desk, "r9")
    for run in ("r1", "r2"):
        arrive(desk, run)
        assert end(desk, run) == []
    arrive(desk, "r3")
    assert end(desk, "r3") == ["r9"]
    assert arrive(desk, "r9", "n2") > line[2]


def test_a_place_is_free_at_once_when_its_message_was_not_sent(desk, line):
    park(desk, "r2")
    desk.release("r1", "-", names=A)
    assert desk.out() == ["r2"]


def test_a_place_is_free_at_once_when_its_call_is_withdrawn(desk, line):
    park(desk, "r2")
    assert desk.withdraw("r1")
    assert desk.resume() == ["r2"]
    assert isinstance(arrive(desk, "r1"), Ended)


def test_a_place_is_free_at_once_when_its_task_is_revoked(desk, line):
    park(desk, "r2")
    assert desk.resume(tasks=("t-r1",)) == ["r2"]


def test_a_call_that_has_begun_is_not_withdrawn_though_its_message_can_come_again(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    assert not desk.withdraw("r1")
    assert desk.waiters(A[0]) == ["r1", "r2", "r3"]
    desk.release("r1", names=A, ended="killed")
    assert arrive(desk, "r1", "n2", again=True) == line[0], "it was not noted as ended"
    desk.lapse("r1", A[0])
    assert desk.withdraw("r1"), "it has died, and its message is awaited"
    assert desk.resume() == ["r2"]


def test_a_revoke_of_a_task_that_runs_leaves_its_place(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    assert desk.resume(tasks=("t-r1",)) == []
    assert desk.waiters(A[0]) == ["r1", "r2", "r3"]


@pytest.mark.parametrize("only", ["", "r1"])
def test_by_force_a_line_goes_on_without_the_message_that_it_waits_for(desk, line, only):
    park(desk, "r2")
    (released,) = desk.backend.force_release(A[0], only)
    of = released.execution_id, released.fence, released.owner, released.label
    assert of == ("r1", line[0], KEPT, "call[r1] here")
    assert desk.resume() == ["r2"]
    arrive(desk, "r2", "n2")
    assert isinstance(arrive(desk, "r1"), Conflict), "it is not lost, it only comes late"


def test_by_force_a_line_that_waits_for_nothing_stays_as_it_is(desk, line):
    """No later call has come: the broker can simply be behind."""
    assert desk.backend.force_release(A[0]) == ()
    park(desk, "r2")
    desk.withdraw("r2")
    assert desk.backend.force_release(A[0]) == ()
    assert arrive(desk, "r1") == line[0]


def test_by_force_a_line_goes_on_for_a_call_that_waits_in_its_process(desk, line):
    desk.queue("r2", names=A, owner=owner("r2", False), inbox="p", wait=60.0)
    ears = desk.listen("p")
    assert [each.execution_id for each in desk.backend.force_release(A[0])] == ["r1"]
    assert ears.heard() == [f"granted r2 n {line[1]}"]


def test_by_force_a_call_that_is_named_loses_its_place_though_nobody_is_behind(desk, line):
    assert [each.execution_id for each in desk.backend.force_release(A[0], "r1")] == ["r1"]
    assert desk.waiters(A[0]) == ["r2", "r3"]


def test_by_force_a_line_goes_on_without_the_call_that_runs(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    assert [each.execution_id for each in desk.backend.force_release(A[0])] == ["r1"]
    assert desk.resume() == ["r2"]
    assert desk.waiters(A[0]) == ["r2", "r3"]


def test_by_force_those_behind_the_first_lose_no_place(desk, line):
    assert desk.backend.force_release(A[0], "r2") == ()
    arrive(desk, "r1")
    assert desk.backend.force_release(A[0], "r2") == ()
    assert [each.execution_id for each in desk.backend.force_release(A[0])] == ["r1"]
    assert desk.waiters(A[0]) == ["r2", "r3"]


def test_by_force_a_call_whose_message_is_here_loses_no_place(desk, line):
    park(desk, "r2")
    arrive(desk, "r1")
    assert end(desk, "r1") == ["r2"]
    assert desk.backend.force_release(A[0]) == ()
    arrive(desk, "r2", "n2")
    desk.acquire("holder")
    desk.park("r2", "m")
    leave_to(desk, "r2", "r2", by="n2")
    park(desk, "r3")
    assert desk.backend.force_release(A[0]) == (), "it is parked for its lock"
    assert desk.waiters(A[0]) == ["r2", "r3"]


def test_a_place_ends_with_its_call_whether_anybody_comes_or_not(desk):
    place(desk, "r1", life=0.05)
    place(desk, "r2")
    desk.wait_ms(60)
    assert arrive(desk, "r2") > 0
    assert passed(desk) == []


def test_a_place_whose_end_has_come_is_cleared_away_though_nobody_came(desk):
    place(desk, "r1", life=0.05)
    desk.wait_ms(60)
    assert passed(desk) == []
    assert desk.waiters(A[0]) == []


def test_the_keys_of_a_line_live_as_long_as_its_places_and_without_end_for_a_message(desk):
    def lives():
        keys = (desk.keys.of_lock("q", A[0]), desk.keys.of_lock("w", A[0]))
        return [desk.client.pttl(key) for key in keys]

    place(desk, "r1", life=100000.0)
    assert all(life > 100_000_000 for life in lives())
    park(desk, "r2")
    place(desk, "r3")
    assert lives() == [-1, -1]


def test_a_call_that_was_replaced_holds_up_nobody(desk, line):
    desk.release("r1", KEPT, ended="execution")
    assert arrive(desk, "r2") == line[1]
    assert passed(desk) == []


def test_a_long_row_of_places_that_have_ended_is_worked_off_in_parts(desk):
    place(desk, "gone", life=0.05)
    record = desk.client.hget(desk.keys.of_lock("w", A[0]), "gone")
    gone = {f"gone{number}": number for number in range(300)}
    desk.client.zadd(desk.keys.of_lock("q", A[0]), gone)
    desk.client.hset(desk.keys.of_lock("w", A[0]), mapping=dict.fromkeys(gone, record))
    ticket = place(desk, "first")
    place(desk, "second")
    desk.wait_ms(60)

    assert isinstance(arrive(desk, "second"), Conflict), "who is ahead is not known yet"
    assert arrive(desk, "first") == ticket


def test_calls_that_are_due_later_stand_by_the_time_at_which_they_are_due(desk):
    later, latest = place(desk, "r1", delay=20.0), place(desk, "r2", delay=30.0)
    between = place(desk, "r3", moment=desk.now_ms() / 1000 + 25)
    assert place(desk, "r4") < later < between < latest
    assert desk.waiters(A[0]) == ["r4", "r1", "r3", "r2"]
    assert arrive(desk, "r4") > 0
    assert end(desk, "r4") == []
    assert arrive(desk, "r9") < later, "it has no place, and is here now"


def test_a_call_without_a_place_waits_before_those_that_are_due_later(desk):
    place(desk, "r1", delay=20.0)
    place(desk, "r2")
    arrive(desk, "r2")
    park(desk, "r9")
    assert desk.waiters(A[0]) == ["r9", "r1"]
    assert end(desk, "r2") == ["r9"]


def test_a_call_that_is_due_later_is_not_late_before(desk):
    place(desk, "r1", gap=0.0, delay=1000.0)
    place(desk, "r2", delay=2000.0)
    park(desk, "r2")
    assert passed(desk) == []


def test_two_calls_that_are_due_at_one_moment_have_an_order(desk):
    moment = desk.now_ms() / 1000 + 100
    assert place(desk, "r2", moment=moment) < place(desk, "r1", moment=moment)


def test_a_call_never_gets_the_place_that_another_has_left_before_those_of_its_moment(desk):
    moment = desk.now_ms() // 1000 + 100.0
    for run in ("r1", "r2", "r3"):
        place(desk, run, moment=moment)
    desk.withdraw("r2")
    place(desk, "r4", moment=moment)
    assert desk.waiters(A[0]) == ["r1", "r3", "r4"]


def test_more_calls_than_fit_into_a_millisecond_have_an_order(desk):
    moment = desk.now_ms() // 1000 + 100.0
    tickets = [place(desk, f"r{number}", moment=moment) for number in range(1010)]
    assert tickets == sorted(set(tickets))
    assert place(desk, "next", moment=moment + 0.002) > tickets[-1]


def test_a_call_whose_message_comes_again_keeps_its_place_while_it_runs(desk, line):
    assert arrive(desk, "r1", again=True) == line[0]
    park(desk, "r2")
    desk.release("r1", names=A, ended="killed")
    assert desk.out() == []
    assert arrive(desk, "r1", "n2", again=True) == line[0]
    assert end(desk, "r1", "n2") == ["r2"]


def test_it_is_late_if_it_does_not_come_again(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    desk.lapse("r1", A[0])
    assert passed(desk) == []
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1"]
    assert desk.out() == ["r2"]


def test_it_is_awaited_though_it_stood_in_the_line_for_longer_than_a_place_lives(desk):
    place(desk, "r0")
    arrive(desk, "r0")
    place(desk, "r1")
    place(desk, "r2")
    park(desk, "r1", again=True)
    park(desk, "r2")
    desk.lapse_place("r1", A[0], line={**desk.place("r1", A[0])["line"], "ends": 1})
    assert end(desk, "r0") == ["r1"]
    ticket = arrive(desk, "r1", "n2", again=True)

    desk.lapse("r1", A[0])

    assert passed(desk) == []
    assert desk.out() == []
    assert arrive(desk, "r1", "n3", again=True) == ticket


def test_it_holds_up_nobody_if_its_message_was_rejected(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    desk.release("r1", names=A)
    assert desk.out() == []
    desk.release("r1", KEPT, names=A)
    assert desk.out() == ["r2"]
    assert isinstance(arrive(desk, "r1", "n2", again=True), Conflict), "it may still come"


def test_a_copy_of_a_call_whose_message_was_rejected_has_its_place(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    desk.park("r1", "copy", names=A, owner=owner("r1", True))
    desk.release("r1", names=A)
    desk.release("r1", KEPT, names=A)
    assert desk.out() == ["r1"]


def test_a_call_whose_message_does_not_come_again_holds_up_nobody_when_it_dies(desk, line):
    arrive(desk, "r1")
    park(desk, "r2")
    desk.release("r1", names=A, ended="killed")
    assert desk.out() == ["r2"]


def test_a_copy_of_a_call_that_runs_is_resumed_first_if_that_dies(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    desk.park("r1", "copy", names=A, owner=owner("r1", True))
    desk.release("r1", names=A, ended="killed")
    assert desk.out() == ["r1"]
    assert arrive(desk, "r1", "n3", again=True) == line[0]


def test_a_copy_of_a_call_that_runs_goes_with_its_end(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    desk.park("r1", "copy", names=A, owner=owner("r1", True))
    assert end(desk, "r1") == ["r2"]
    assert isinstance(arrive(desk, "r1", "copy2"), Ended)


def test_a_copy_of_a_call_that_has_run_asks_if_the_message_is_not_acknowledged(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    desk.park("r1", "copy", names=A, owner=owner("r1", True))
    desk.release("r1", names=A, ended="unacknowledged")
    assert desk.out() == ["r1"]
    assert isinstance(arrive(desk, "r1", "copy2"), Ended)
    assert desk.resume() == ["r2"]


def test_a_call_that_has_run_leaves_its_place_though_its_message_is_not_acknowledged(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    desk.release("r1", names=A, ended="unacknowledged")
    assert desk.out() == ["r2"]
    assert desk.waiters(A[0]) == ["r2", "r3"]


def leave_to(desk: Desk, run: str, successor: str, keep: float = 100.0, by: str = "n") -> list[str]:
    """It has run, or is parked for its lock: whose messages are resumed."""
    ended = {} if run == successor else {"ended": "execution", "remember": 9.0}
    to = Successor(successor, keep)
    found = desk.backend.release(Release(A, run, by, homes="h", successor=to, **ended))
    return [message.execution_id for message in found.messages]


def test_a_retry_has_the_place_of_its_call(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    assert leave_to(desk, "r1", "r1-retry") == []
    assert desk.resume() == []
    assert arrive(desk, "r1-retry") == line[0]
    assert end(desk, "r1-retry") == ["r2"]


def test_a_retry_has_its_place_though_the_command_that_leaves_it_came_twice(desk, line):
    arrive(desk, "r1")
    for _ in range(2):
        leave_to(desk, "r1", "r1-retry")
    park(desk, "r2")
    assert arrive(desk, "r1-retry") == line[0]


def test_a_retry_of_a_call_that_nobody_is_behind_has_its_place(desk):
    ticket = place(desk, "r1")
    arrive(desk, "r1")
    leave_to(desk, "r1", "r1-retry")
    place(desk, "r2")
    park(desk, "r2")
    assert arrive(desk, "r1-retry") == ticket


def test_a_retry_that_comes_before_its_call_has_ended_goes_before_those_behind(desk, line):
    arrive(desk, "r1")
    park(desk, "r2")
    park(desk, "r1-retry")
    assert leave_to(desk, "r1", "r1-retry") == ["r1-retry"]
    assert arrive(desk, "r1-retry", "n2") == line[0]


def test_a_retry_of_a_call_without_a_place_goes_before_those_sent_while_the_call_waited(desk):
    place(desk, "r1")
    arrive(desk, "r1")
    park(desk, "r9")
    place(desk, "r2")
    assert end(desk, "r1") == ["r9"]
    arrive(desk, "r9", "n2")
    park(desk, "r2")
    assert leave_to(desk, "r9", "r9-retry", by="n2") == []
    assert arrive(desk, "r9-retry")


@pytest.mark.parametrize("again", [True, False])
def test_a_call_that_waits_in_its_process_has_its_place_and_leaves_it(desk, line, again):
    """Where its message can be neither parked nor sent again."""
    arrive(desk, "r1")
    for run in ("r2", "r1-retry"):
        desk.queue(run, names=A, owner=owner(run, again), inbox="p", wait=60.0)
    park(desk, "r3")
    ears = desk.listen("p")
    leave_to(desk, "r1", "r1-retry")
    assert ears.heard() == [f"granted r1-retry n {line[0]}"]
    assert end(desk, "r1-retry") == []
    assert ears.heard() == [f"granted r2 n {line[1]}"]
    assert end(desk, "r2") == ["r3"]
    arrive(desk, "r3", "n2")
    end(desk, "r3", "n2")
    desk.resume()
    assert desk.left() == []


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("is_quick", [True, False])
def test_a_retry_whose_process_is_killed_keeps_its_place_if_its_message_comes_again(
    desk, line, again, is_quick
):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    if is_quick:
        park(desk, "r1-retry", "n0", again=again)
    leave_to(desk, "r1", "r1-retry")
    assert arrive(desk, "r1-retry", again=again) == line[0]
    desk.release("r1-retry", names=A, ended="killed")
    assert desk.out() == ([] if again else ["r2"])
    assert not again or arrive(desk, "r1-retry", "n2", again=True) == line[0]


def test_a_retry_that_does_not_come_is_passed_over(desk, line):
    arrive(desk, "r1")
    park(desk, "r2")
    leave_to(desk, "r1", "r1-retry")
    assert passed(desk) == []
    desk.age_call("r1-retry", A[0])
    assert passed(desk) == ["r1-retry"]
    assert desk.out() == ["r2"]


def test_a_retry_is_not_late_while_messages_come_that_were_sent_before_its_own(desk, line):
    arrive(desk, "r1")
    park(desk, "r2")
    leave_to(desk, "r1", "r1-retry")
    assert passed(desk) == []
    desk.age_call("r1-retry", A[0])
    park(desk, "r3")
    assert passed(desk) == [], "the broker is behind"
    desk.age_call("r1-retry", A[0])
    assert isinstance(arrive(desk, "r3", "n2"), Conflict), "it came before"
    assert passed(desk) == ["r1-retry"]
    assert desk.out() == ["r2"]


def test_the_same_of_a_retry_whose_process_was_killed_and_that_of_its_copy(desk, line):
    arrive(desk, "r1")
    park(desk, "r2")
    leave_to(desk, "r1", "r1-retry")
    arrive(desk, "r1-retry", again=True)
    desk.park("r1-retry", "n2", names=A, owner=owner("r1-retry", again=True))
    desk.release("r1-retry", names=A, ended="killed")
    assert desk.out() == ["r1-retry"]
    arrive(desk, "r1-retry", "n3", again=True)
    desk.release("r1-retry", "n3", names=A, ended="killed")
    assert passed(desk) == []
    desk.age_call("r1-retry", A[0])
    park(desk, "r3")
    assert passed(desk) == [], "the broker is behind"


def test_a_retry_is_late_when_a_message_has_come_that_was_sent_after_its_own(desk, line):
    arrive(desk, "r1")
    park(desk, "r2")
    leave_to(desk, "r1", "r1-retry")
    assert passed(desk) == []
    desk.age_call("r1-retry", A[0])
    place(desk, "r4")
    park(desk, "r4")
    assert passed(desk) == ["r1-retry"]


def test_a_retry_that_is_cancelled_leaves_the_line(desk, line):
    arrive(desk, "r1")
    park(desk, "r2")
    leave_to(desk, "r1", "r1-retry")
    assert desk.withdraw("r1-retry")
    assert desk.resume() == ["r2"]


@pytest.mark.parametrize("again", [True, False])
def test_the_place_of_a_retry_is_free_at_once_when_its_task_is_revoked(desk, line, again):
    arrive(desk, "r1", again=again)
    park(desk, "r2")
    leave_to(desk, "r1", "r1-retry")
    assert desk.resume(tasks=("t-r1",)) == ["r2"]
    assert desk.waiters(A[0]) == ["r2", "r3"]


@pytest.mark.parametrize("again", [True, False])
def test_a_revoke_of_a_retry_that_runs_leaves_its_place(desk, line, again):
    arrive(desk, "r1", again=again)
    leave_to(desk, "r1", "r1-retry")
    arrive(desk, "r1-retry", again=again)
    park(desk, "r2")
    assert desk.resume(tasks=("t-r1",)) == []
    assert end(desk, "r1-retry") == ["r2"]


@pytest.mark.parametrize("again", [True, False])
def test_a_retry_of_a_retry_leaves_its_place_when_its_task_is_revoked(desk, line, again):
    arrive(desk, "r1", again=again)
    leave_to(desk, "r1", "r1-retry")
    arrive(desk, "r1-retry", again=again)
    leave_to(desk, "r1-retry", "r1-third")
    park(desk, "r2")
    assert desk.resume(tasks=("t-r1",)) == ["r2"]


def test_a_retry_with_a_place_of_its_own_is_found_by_its_task_when_its_call_has_ended(desk, line):
    arrive(desk, "r1", again=True)
    place(desk, "r1-retry")
    end(desk, "r1")
    desk.resume(tasks=("t-r1",))
    assert desk.waiters(A[0]) == ["r2", "r3"]


def test_the_place_of_a_retry_that_is_due_in_days_lives_as_long(desk, line):
    arrive(desk, "r1")
    leave_to(desk, "r1", "r1-retry", 400_000.0)
    park(desk, "r9")
    desk.withdraw("r9")
    assert desk.client.pttl(desk.keys.of_lock("q", A[0])) > 400_000_000


def test_a_call_that_is_cancelled_while_it_is_parked_for_its_lock_leaves_the_line(desk, line):
    arrive(desk, "r1")
    park(desk, "r2")
    desk.acquire("holder")
    desk.park("r1", "m")
    leave_to(desk, "r1", "r1")
    desk.withdraw("r1")
    desk.all_due()
    assert desk.resume() == ["r2"]


@pytest.mark.parametrize("again", [True, False])
def test_a_call_that_is_parked_for_its_lock_is_not_late_while_its_message_is_there(
    desk, line, again
):
    arrive(desk, "r1", again=again)
    park(desk, "r2")
    desk.acquire("holder")
    desk.park("r1", "m")
    leave_to(desk, "r1", "r1")
    desk.age_call("r1", A[0])
    assert passed(desk) == []
    desk.release("holder")
    assert passed(desk) == []
    assert desk.out() == ["r1"]
    assert arrive(desk, "r1", "n2") == line[0]


def test_the_place_of_a_call_that_is_parked_for_its_lock_does_not_end(desk):
    place(desk, "r1")
    arrive(desk, "r1")
    desk.acquire("holder")
    desk.park("r1", "m")
    leave_to(desk, "r1", "r1")
    assert desk.client.pttl(desk.keys.of_lock("q", A[0])) > 2 * 86_400_000


def test_a_call_whose_message_is_parked_for_its_lock_no_more_is_late(desk, line):
    arrive(desk, "r1", again=True)
    park(desk, "r2")
    desk.acquire("holder")
    desk.park("r1", "m")
    leave_to(desk, "r1", "r1")
    desk.client.delete(desk.keys.parked())  # a server that evicts keys
    desk.age_call("r1", A[0])
    assert passed(desk) == ["r1"]


@pytest.mark.parametrize("ends", ["late", "forced"])
def test_a_call_whose_message_the_server_has_evicted_is_awaited_again(desk, line, ends):
    arrive(desk, "r1")
    park(desk, "r2")
    desk.client.delete(desk.keys.of_lock("m", A[0]))
    end(desk, "r1")
    assert isinstance(arrive(desk, "r3"), Conflict)

    if ends == "late":
        desk.age_call("r2", A[0])
    else:
        assert [hold.execution_id for hold in desk.backend.force_release(A[0])] == ["r2"]

    assert arrive(desk, "r3", "n2") == line[2]
    end(desk, "r3", "n2")
    desk.resume()
    assert desk.left() == []


@pytest.mark.parametrize("how", ["runs", "is left to itself", "is parked for its lock"])
def test_a_place_ends_when_its_call_expires_though_the_call_has_begun(desk, how):
    place(desk, "r1", life=60.0)
    arrive(desk, "r1", again=True)
    if how == "is left to itself":
        leave_to(desk, "r1", "r1")
    elif how == "is parked for its lock":
        desk.acquire("holder")
        desk.park("r1", "m")
        leave_to(desk, "r1", "r1")
        desk.all_due()
        desk.resume()

    assert desk.place("r1", A[0])["line"]["ends"] < desk.now_ms() + 61_000


def test_an_execution_that_is_parked_for_its_lock_keeps_both_its_places(desk, line):
    desk.acquire("holder")
    arrive(desk, "r1")
    park(desk, "r2")
    desk.park("r1", "m")
    leave_to(desk, "r1", "r1")
    desk.release("holder")
    assert desk.out() == ["r1"]
    assert arrive(desk, "r1", "n2") == line[0]
    assert isinstance(desk.acquire("r1", "m2"), Held)


def test_a_lock_is_free_for_others_while_calls_of_its_line_wait(desk, line):
    park(desk, "r2")
    assert isinstance(desk.acquire("somebody"), Held)


def test_nothing_is_left_of_a_line(desk, line):
    for run in ("r1", "r2", "r3"):
        arrive(desk, run, again=True)
        end(desk, run)
    desk.resume()
    assert desk.waiters(A[0]) == []
    assert desk.left() == []


@pytest.mark.parametrize("comes", [True, False])
def test_nothing_is_left_of_a_place_that_ended_while_there_was_no_worker(desk, comes):
    place(desk, "gone", life=0.05)
    # The web processes go on to send.
    desk.backend.place(PlaceRequest(f"{LINE}b", "r2", "t-r2", "r2", GAP, 0.0, 0.0, DAY))
    desk.wait_ms(60)
    desk.go_by(60)
    assert passed(desk) == []
    if comes:
        assert arrive(desk, "gone") > 0
        assert end(desk, "gone") == []
    desk.go_by(60)
    assert desk.traces("gone") == []
    assert desk.traces("r2"), "the test would see it"


def _is_found(desk: Desk, run: str, by: str) -> bool:
    """Whether a call whose message is awaited is found, and leaves its line."""
    if by == "id":
        return desk.withdraw(run)
    desk.resume(tasks=(f"t-{run}",))
    return run not in desk.waiters(A[0])


@pytest.mark.parametrize("by", ["id", "task"])
def test_a_call_is_found_for_as_long_as_its_place_lives(desk, by):
    place(desk, "r1", life=2 * DAY)
    desk.go_by(2 * DAY)
    assert _is_found(desk, "r1", by)


@pytest.mark.parametrize("by", ["id", "task"])
def test_so_is_one_that_stood_in_the_line_for_longer_and_whose_process_has_died(desk, by):
    place(desk, "r0")
    arrive(desk, "r0")
    place(desk, "r1")
    park(desk, "r1", again=True)
    desk.go_by(2 * DAY)
    desk.release("r0", names=A)
    arrive(desk, "r1", "n2", again=True)
    desk.release("r1", "n2", names=A, ended="killed")
    assert _is_found(desk, "r1", by)


@pytest.mark.parametrize("by", ["id", "task"])
def test_so_is_one_whose_message_is_parked_for_its_lock_no_more(desk, by):
    place(desk, "r1")
    arrive(desk, "r1")
    desk.acquire("holder")
    desk.park("r1", "m")
    leave_to(desk, "r1", "r1")
    desk.all_due()
    desk.resume()
    desk.client.delete(desk.keys.parked())  # a server that evicts keys
    desk.go_by(2 * DAY)
    assert _is_found(desk, "r1", by)


def test_a_place_whose_call_was_due_long_ago_is_one_like_any_other(desk):
    """Its `countdown` is negative."""
    place(desk, "r1", delay=-2 * DAY, life=DAY)
    assert arrive(desk, "r1") > 0


def test_an_answer_to_park_is_repeated(desk, line):
    park(desk, "r2")
    assert isinstance(desk.leave("r2", "n", names=A, owner=owner("r2", False)), Parked)
    assert desk.waiters(A[0]) == ["r1", "r2", "r3"]


@pytest.mark.parametrize("late", ["park", "acquire"])
def test_a_late_copy_of_what_parked_a_call_does_not_take_its_turn(desk, line, late):
    park(desk, "r2")
    assert arrive(desk, "r1") == line[0]
    end(desk, "r1")

    if late == "park":
        answer = desk.leave("r2", names=A, owner=owner("r2", False))
        assert answer == Parked(0)
    else:
        assert isinstance(arrive(desk, "r2"), Conflict)

    assert desk.holders(A[0]) == []
    assert arrive(desk, "r2", "back") == line[1]
