"""Runs that wait for each other are told so; nobody is told so who only waits."""

from __future__ import annotations

import pytest

from celery_relock.engine.protocol import (
    COMES_AGAIN,
    LINE,
    Conflict,
    Deadlocked,
    Held,
    Parked,
    PlaceRequest,
    Queued,
    Release,
    Successor,
)


@pytest.fixture
def crossed(desk):
    """r1 has x and cannot end before its inner call has y; r2 has y."""
    desk.fence("r1", names=("x",))
    desk.fence("r2", names=("y",))
    desk.queue("in1", names=("y",), stuck=("r1",), label="the first one")
    return desk


def ask(desk, *, parks=False, **more):
    """r2's inner call wants x."""
    how = {"names": ("x",), "stuck": ("r2",), **more}
    return desk.leave("in2", **how) if parks else desk.acquire("in2", wait=6.0, **how)


@pytest.mark.parametrize("parks", [False, True])
def test_two_that_wait_for_each_other_are_a_deadlock_and_leave_no_place(crossed, parks):
    answer = ask(crossed, parks=parks)

    assert answer == Deadlocked(("x", "the first one", "y"))
    assert crossed.waiters("x") == []
    assert crossed.holders("x") == ["r1"]
    assert crossed.waiters("y") == ["in1"], "the one that waited first goes on waiting"


@pytest.mark.parametrize("parks", [False, True])
def test_who_waited_before_it_became_one_gives_up_its_place_when_it_asks_again(desk, parks):
    desk.fence("r1", names=("x",))
    desk.fence("r2", names=("y",))
    if parks:
        desk.park("in2", "before", names=("x",))
    else:
        desk.queue("in2", names=("x",))
    desk.queue("in1", names=("y",), stuck=("r1",), label="the first one")

    assert isinstance(ask(desk, parks=parks), Deadlocked)
    assert desk.waiters("x") == []


def test_a_parked_execution_waits_like_any_other(desk):
    desk.fence("r1", names=("x",))
    desk.fence("r2", names=("y",))
    desk.park("in1", names=("y",), stuck=("r1",))

    assert isinstance(ask(desk, parks=True), Deadlocked)


def test_three_in_a_ring_are_a_deadlock(crossed):
    crossed.fence("r3", names=("z",))
    crossed.queue("in2", names=("z",), stuck=("r2",), label="the second one")

    answer = crossed.acquire("in3", wait=6.0, names=("x",), stuck=("r3",))

    assert answer == Deadlocked(("x", "the first one", "y", "the second one", "z"))


def test_whoever_waits_for_its_own_call_stack_is_a_deadlock(desk):
    desk.fence("r1")

    assert desk.acquire("in1", wait=6.0, stuck=("r1",)) == Deadlocked(("a",))


def test_whoever_does_not_wait_is_told_who_holds_it(crossed):
    assert isinstance(crossed.acquire("in2", names=("x",), stuck=("r2",)), Conflict)


@pytest.mark.parametrize("how", ["died", "left", "came in"])
def test_who_waits_no_longer_is_in_no_deadlock(crossed, how):
    if how == "died":
        crossed.lapse_place("in1", "y")
    elif how == "left":
        crossed.release("in1", names=("y",))
    else:
        crossed.lapse("r2", "y")
        assert isinstance(crossed.beat("in1", name="y"), Held)

    assert isinstance(ask(crossed), Queued)


def test_whoever_waits_without_a_hold_of_its_own_is_in_no_deadlock(crossed):
    assert isinstance(ask(crossed, stuck=()), Queued)
    assert isinstance(crossed.acquire("stranger", wait=6.0, names=("y",), stuck=("r9",)), Queued)


def test_a_lock_with_several_permits_is_stuck_only_if_all_are(crossed):
    crossed.fence("other", names=("x",), limit=2)
    assert isinstance(ask(crossed, limit=2), Queued)
    crossed.release("in2", names=("x",))

    crossed.queue("in-other", names=("y",), stuck=("other",))
    assert isinstance(ask(crossed, limit=2), Deadlocked)


def test_several_permits_can_be_stuck_behind_one_hold(desk):
    for run in ("r1", "r2"):
        desk.fence(run, names=("s",), limit=2)
    desk.fence("r3", names=("y",))
    desk.fence("r4", names=("x",))
    desk.queue("in3", names=("x",), stuck=("r3",))
    for run in ("r1", "r2"):
        desk.queue(f"in-{run}", names=("y",), stuck=(run,))

    answer = desk.acquire("in4", wait=6.0, names=("s",), limit=2, stuck=("r4",))

    assert isinstance(answer, Deadlocked)
    assert answer.path[::2] == ("s", "y", "x")


def test_a_permit_that_is_promised_to_somebody_else_comes_free_again(crossed):
    crossed.fence("other", names=("x",), limit=2)
    crossed.park("next", names=("x",), limit=2)
    crossed.release("other", names=("x",))
    assert crossed.out() == ["next"]

    assert isinstance(ask(crossed, limit=2), Queued)


def test_of_several_locks_any_may_close_the_ring(crossed):
    crossed.fence("r9", names=("free",))

    answer = crossed.acquire("in2", wait=6.0, names=("free", "x"), stuck=("r2",))

    assert isinstance(answer, Deadlocked)
    assert answer.path[0] == "x"


def test_of_those_that_wait_for_one_hold_only_some_are_noted(desk):
    """A section may have thousands of tasks that wait for another lock."""
    desk.fence("r1", names=("x",))
    desk.fence("r2", names=("y",))
    for i in range(20):
        desk.queue(f"in{i}", names=("y",), stuck=("r1",))

    assert desk.client.hlen(f"{desk.keys.prefix(0)}s:r1") == 16
    assert isinstance(ask(desk), Deadlocked)


def test_when_nobody_waits_nothing_is_noted(crossed):
    assert crossed.client.exists(f"{crossed.keys.prefix(0)}s:r1") == 1

    crossed.release("r2", names=("y",))
    crossed.acquire("in1", names=("y",), stuck=("r1",))

    assert crossed.client.exists(f"{crossed.keys.prefix(0)}s:r1") == 0


def test_another_attempt_that_is_in_nobodys_way_is_not_taken_for_the_one_that_died(desk):
    desk.fence("r1", names=("x",))
    desk.fence("r2", names=("y",))
    desk.queue("in1", "died", names=("y",), stuck=("r1",))
    desk.lapse_place("in1", "y")
    desk.queue("in1", "another", names=("y",))

    assert isinstance(ask(desk), Queued)


def test_the_notes_of_a_queue_that_expires_go_with_it(desk):
    """B11: nobody is left to remove them."""
    desk.fence("r1", names=("x",))
    desk.fence("r2", names=("y",))
    desk.queue("in1", names=("y",), stuck=("r1",), wait=2.0)
    note = f"{desk.keys.prefix(0)}s:r1"

    # Others are noted all the time: each note has an end of its own.
    desk.queue("in2", names=("y",), stuck=("r9",), wait=900.0)
    assert 0 < desk.client.pttl(note) <= 62_000
    desk.beat("in1", name="y", wait=600.0)
    assert desk.client.pttl(note) > 600_000, "a waiter that lives keeps its note"


def test_several_permits_of_one_lock_in_one_ring_are_a_deadlock(desk):
    for run in ("r0", "r1"):
        desk.fence(run, names=("jobs",), limit=2)
    desk.fence("r2", names=("account",))
    desk.queue("in2", names=("jobs",), limit=2, stuck=("r2",))
    desk.queue("in1", names=("account",), stuck=("r1",))

    answer = desk.acquire("in0", wait=6.0, names=("account",), stuck=("r0",))

    assert isinstance(answer, Deadlocked)
    assert answer.path[::2] == ("account", "jobs")


def test_of_several_permits_the_own_one_is_named(desk):
    for run in ("older", "own"):
        desk.fence(run, names=("jobs",), limit=2)
    desk.queue("waits", names=("jobs",), limit=2, stuck=("older",))

    answer = desk.acquire("inner", wait=6.0, names=("jobs",), limit=2, stuck=("own",))

    assert answer == Deadlocked(("jobs",))


@pytest.fixture(params=["queue", "park"])
def ahead(request, desk):
    """r1 has x; y1 waits for x and z, so it is ahead of all who come for z."""
    desk.fence("r1", names=("x",))
    getattr(desk, request.param)("y1", names=("x", "z"), limits=(1, 1))
    return desk


def test_who_holds_what_somebody_ahead_waits_for_passes_at_a_free_lock(ahead):
    desk = ahead
    assert isinstance(desk.acquire("stranger", names=("z",)), Conflict)

    assert isinstance(desk.acquire("in1", wait=6.0, names=("z",), stuck=("r1",)), Held)
    assert desk.waiters("z") == ["y1"]


def test_who_holds_what_somebody_ahead_waits_for_passes_even_if_it_does_not_wait(ahead):
    assert isinstance(ahead.acquire("in1", names=("z",), stuck=("r1",)), Held)
    assert ahead.waiters("z") == ["y1"]


@pytest.mark.parametrize("how", ["queue", "park"])
def test_who_holds_what_somebody_ahead_waits_for_passes_in_the_queue(desk, how):
    desk.fence("r1", names=("x",))
    desk.fence("r2", names=("z",))
    desk.park("y1", names=("x", "z"), limits=(1, 1))
    desk.park("y2", names=("z",))
    desk.listen("up")
    more = {"inbox": "up"} if how == "queue" else {}

    assert getattr(desk, how)("in1", names=("z",), stuck=("r1",), **more) == 0

    assert desk.waiters("z") == ["in1", "y1", "y2"]
    desk.release("r2", names=("z",))
    if how == "queue":
        assert desk.holders("z") == ["in1"]
    else:
        assert desk.out() == ["in1"]


@pytest.mark.parametrize(
    ("how", "more", "expected"),
    [
        ("park", {}, Deadlocked),
        ("park", {"patience": 60.0}, Queued),
        ("queue", {}, Queued),
    ],
    ids=["parked", "parked with a bound", "in a process, always with a bound"],
)
def test_a_ring_by_way_of_a_queue_is_a_deadlock_if_nobody_in_it_gives_up(desk, how, more, expected):
    """r1 waits for r2, whose call is behind y1, which waits for r1."""
    desk.fence("r1", names=("x",))
    desk.fence("r2", names=("q",))
    desk.fence("r3", names=("z",))
    getattr(desk, how)("y1", names=("x", "z"), limits=(1, 1), **more)
    desk.queue("in2", names=("z",), stuck=("r2",))
    desk.release("r3", names=("z",))

    assert isinstance(desk.acquire("in1", wait=6.0, names=("q",), stuck=("r1",)), expected)


def test_who_may_join_a_part_of_its_locks_is_in_no_deadlock(desk):
    desk.fence("r1", names=("x",), owner="o")
    desk.fence("r2", names=("y",))
    both = {"names": ("x", "y"), "limits": (1, 1), "owner": "o", "ancestors": ("r1",)}
    desk.queue("in1", **both)

    assert isinstance(ask(desk), Queued)
    desk.release("r1", names=("x",))
    assert isinstance(ask(desk), Held)


def test_nobody_is_stuck_at_a_lock_that_it_may_join(desk):
    """in2 waits for y alone, which r3 has."""
    desk.fence("r1", names=("x",), owner="o")
    desk.fence("r2", names=("z",))
    desk.fence("r3", names=("y",))
    desk.fence("r4", names=("w",))
    desk.queue("in1", names=("w",), stuck=("r1",))
    both = {"names": ("x", "y"), "limits": (1, 1), "owner": "o", "ancestors": ("r1",)}
    desk.queue("in2", stuck=("r2",), **both)

    assert isinstance(desk.acquire("in4", wait=6.0, names=("z",), stuck=("r4",)), Queued)
    assert isinstance(desk.acquire("in5", wait=6.0, stuck=("r4",), **both), Queued)


@pytest.mark.parametrize("number", range(6))  # in which order the holds of u are looked at
def test_who_was_only_stuck_while_somebody_else_was_looked_at_ends(desk, number):
    """k waits for r9 and for h, a for h, h for a permit of s that b will release."""
    a, k = f"a{number}", f"{'k' * number}{number}"
    desk.fence("r9", names=("x",))
    desk.fence("h", names=("y",))
    desk.fence("b", names=("s",), limit=2)
    desk.fence(a, names=("s",), limit=2)
    for run in (a, k):
        desk.fence(run, names=("u",), limit=2)
        desk.queue(f"in-{run}", names=("y",), stuck=(run,))
    desk.queue("in-h", names=("s",), limit=2, stuck=("h",))
    desk.queue("again", names=("x",), stuck=(k,))

    assert isinstance(desk.acquire("in9", wait=6.0, names=("u",), limit=2, stuck=("r9",)), Queued)


def test_a_waiter_that_is_parked_instead_leaves_no_note_of_what_could_not_end_before(desk):
    desk.fence("r0")
    desk.queue("r1", stuck=("r9",))

    desk.park("r1")
    desk.release("r0")
    desk.fence("r1", "copy")
    desk.release("r1", "copy")

    assert desk.left() == []


Z = (f"{LINE}z",)
may_come_again = pytest.mark.parametrize("again", ["", COMES_AGAIN])


def send(desk):
    """r1 has x and r2 has z. r3 and in1, a step of r1, were sent in the order of z."""
    desk.fence("r1", names=("x",))
    desk.fence("r2", names=("z",))
    for run in ("r3", "in1"):
        told = PlaceRequest(Z[0], run, f"t-{run}", f"the call {run}", 60.0, 0.0, 0.0, 1000.0)
        assert desk.backend.place(told)
    return desk


@pytest.fixture
def in_line(desk):
    return send(desk)


def comes(desk, run, again="", attempt="n"):
    """It has its turn."""
    desk.fence(run, attempt, names=Z, owner=f"{again}t-{run}", label=f"the call {run}")


def waits(desk, run):
    """It has its turn, and asks for its lock. If it is parked, it leaves the turn to itself."""
    stuck = (run, "r1") if run == "in1" else (run,)
    answer = desk.leave(run, "of-z", names=("z",), stuck=stuck, label=f"the call {run}")
    if isinstance(answer, Parked):
        left_to = Successor(run, 60.0)
        desk.backend.release(Release(Z, run, "n", "parked", 60.0, "h", left_to))
    return answer


def is_behind(desk, attempt="n", **more):
    """The step asks for its turn."""
    how = {"names": Z, "stuck": ("r1",), "label": "the call in1", **more}
    return (desk.acquire if more else desk.leave)("in1", attempt, **how)


@may_come_again
def test_who_has_what_keeps_a_line_from_going_on_is_told(in_line, again):
    comes(in_line, "r3", again)
    waits(in_line, "r3")
    assert isinstance(is_behind(in_line), Parked)

    assert ask(in_line) == Deadlocked(("x", "the call in1", Z[0], "the call r3", "z"))


@may_come_again
@pytest.mark.parametrize("parks", [False, True])
def test_who_is_behind_one_that_waits_for_it_in_a_line_is_told(in_line, parks, again):
    comes(in_line, "r3", again)
    waits(in_line, "r3")
    ask(in_line, label="the other")

    answer = is_behind(in_line) if parks else is_behind(in_line, wait=6.0)

    assert answer == Deadlocked((Z[0], "the call r3", "z", "the other", "x"))
    assert in_line.waiters(Z[0]) == ["r3", "in1"], "its place ends with its execution"


def test_in_a_line_nobody_is_passed(in_line):
    comes(in_line, "r3")
    waits(in_line, "r3")
    ask(in_line)

    assert isinstance(is_behind(in_line, wait=0.0), Conflict)
    assert in_line.holders(Z[0]) == []


@pytest.mark.parametrize(
    ("again", "lost"), [("", False), (COMES_AGAIN, False), (COMES_AGAIN, True)]
)
def test_who_is_behind_one_that_begins_to_wait_for_it_in_a_line_is_told(in_line, again, lost):
    is_behind(in_line)
    comes(in_line, "r3", again)
    ask(in_line, label="the other")
    in_line.park("r4", names=("z",))
    in_line.park("r5", names=Z, owner="t-r5")
    if lost:
        in_line.lapse("r3", Z[0])

    assert isinstance(waits(in_line, "r3"), Parked), "it has nothing but its turn"

    assert in_line.waiters("z") == ["r4", "r3"]
    assert in_line.resume() == ["in1"], "not the one whom nobody waits for"
    answer = is_behind(in_line, "m")
    assert answer == Deadlocked((Z[0], "the call r3", "z", "the other", "x"))


def test_who_is_to_ask_again_keeps_its_place_and_so_does_the_first_of_the_line(desk):
    desk.fence("r0", names=Z)
    send(desk)
    desk.park("r3", names=Z, owner=f"{COMES_AGAIN}t-r3", stuck=("r9",))  # a step, too
    is_behind(desk)
    desk.release("r0", names=Z)
    assert desk.out() == ["r3"]
    comes(desk, "r3", COMES_AGAIN, "m")
    ask(desk)

    desk.queue("r3", "m", names=("z",), stuck=("r3", "r9"))

    assert desk.resume() == ["in1"]
    assert desk.waiters(Z[0]) == ["r3", "in1"]


def test_who_is_called_inside_of_a_turn_is_told_itself(in_line):
    comes(in_line, "r3")
    is_behind(in_line)

    inner = in_line.acquire("inner", wait=6.0, names=("x",), stuck=("r3",))

    assert inner == Deadlocked(("x", "the call in1", Z[0]))
    assert in_line.resume() == []


def test_who_waits_for_a_message_in_a_line_is_in_no_deadlock(in_line):
    ask(in_line)

    assert isinstance(is_behind(in_line), Parked)


def test_who_is_behind_one_that_is_about_to_run_in_a_line_is_in_no_deadlock(in_line):
    comes(in_line, "r3")
    waits(in_line, "r3")
    ask(in_line)
    in_line.release("r2", names=("z",))
    assert in_line.out() == ["r3"]

    assert isinstance(is_behind(in_line), Parked)


@may_come_again
def test_who_has_its_turn_waits_for_it_no_longer(in_line, again):
    comes(in_line, "r3")
    is_behind(in_line)
    in_line.release("r3", names=Z, ended="execution")
    assert in_line.out() == ["in1"]
    comes(in_line, "in1", again, "m")
    in_line.fence("r2", names=("y",))
    in_line.queue("inner", names=("y",), stuck=("in1", "r1"), label="what it calls")

    assert ask(in_line) == Deadlocked(("x", "what it calls", "y"))
