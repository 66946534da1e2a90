"""acquire: who gets the lock, by what right, and what everybody else is told."""

from __future__ import annotations

from celery_relock.engine.protocol import Conflict, Ended, Held, OtherAttempt, Queued


def claim_of(
    desk, run, attempt_id="n", *, lease=30_000, wait=0, by_owner=0, ancestors="", owner="o"
):
    """The raw command for lock "a"."""
    words = f"{run} {attempt_id} {owner} {lease} {by_owner} inbox 1"
    place = [f'{{"wait":{wait}}}'] if wait else []
    return desk.keys.claim(("a",), run), [words, "a person", ancestors, *place]


def test_a_free_lock_is_held_with_a_fence_and_not_reentered(desk):
    tag, fence, reentered = desk.raw("acquire", *claim_of(desk, "r1"))

    assert (tag, reentered) == ("HELD", "0")
    assert abs(int(fence) / 1000 - desk.now_ms()) < 60_000, "a fence is the server's time in µs"


def test_the_short_way_leaves_what_the_long_one_does(desk):
    desk.raw("acquire", *claim_of(desk, "r1"))
    fast = desk.client.hgetall(desk.keys.lock("a"))
    # A tombstone of another attempt leads around the fast way.
    desk.release("r2", "old", ended="attempt")
    keys, args = claim_of(desk, "r2")
    desk.raw("acquire", [*keys[:2], desk.keys.lock("b")], args)
    full = desk.client.hgetall(desk.keys.lock("b"))

    def shape(fields, run):
        expiry, fence, attempt_id, owner, bound = fields[run].split(b" ")
        assert abs(int(expiry) - desk.now_ms() - 30_000) < 5_000
        assert len(fence) == 16
        assert bound == b"p"  # 2^15 ms
        return attempt_id, owner, fields[b"@" + run]

    assert len(fast) == len(full) == 2
    assert shape(fast, b"r1") == shape(full, b"r2") == (b"n", b"o", b"inbox a person")
    for name in "ab":
        assert 85_000 < desk.client.pttl(desk.keys.lock(name)) <= 90_000


def test_a_stranger_is_told_who_holds_it_and_for_how_long(desk):
    fence = desk.fence("r1", owner="o1", label="worker 1")
    desk.queue("r2")

    tag, index, ms, told, *rest = desk.raw("acquire", *claim_of(desk, "r3"))

    assert (tag, index, int(told), *rest) == ("BUSY", 1, fence, "o1", "- worker 1", 1, 0, 0, 0)
    assert 25_000 < ms <= 30_000
    answer = desk.acquire("r3")
    assert answer == Conflict("a", answer.remaining, fence, "o1", "worker 1", 1)


def test_busy_names_the_oldest_permit(desk):
    oldest = desk.fence("r1", limit=2)
    desk.fence("r2", limit=2)

    answer = desk.acquire("r3", limit=2)

    assert (answer.fence, answer.owner) == (oldest, "r1")


def test_a_stranger_that_waits_is_told_its_rank_and_when_to_look_again(desk):
    desk.fence("r1", lease=30)
    desk.fence("r2", lease=20, limit=2)

    assert desk.queue("r3", limit=2) == 0
    tag, rank, ms = desk.raw("acquire", *claim_of(desk, "r4", wait=6000))

    assert (tag, rank) == ("WAIT", "1")
    assert 15_000 < int(ms) <= 20_000, "the lease that ends first"


def test_as_many_permits_as_the_limit_and_not_one_more(desk):
    fences = [desk.fence(f"r{i}", limit=3) for i in range(3)]

    assert isinstance(desk.acquire("r3", limit=3), Conflict)
    assert len(set(fences)) == 3


def test_a_repeated_command_gets_the_same_answer_and_changes_nothing(desk):
    keys, args = claim_of(desk, "r1")
    first = desk.raw("acquire", keys, args)
    desk.wait_ms(2)

    assert desk.raw("acquire", keys, args) == first
    assert len(desk.client.hgetall(desk.keys.lock("a"))) == 2


def test_a_repeated_command_keeps_its_place_in_the_queue(desk):
    desk.fence("r1")
    assert [desk.queue("r2"), desk.queue("r3")] == [0, 1]

    assert desk.queue("r2") == 0
    assert desk.waiters() == ["r2", "r3"]


def test_a_repeated_command_that_finds_its_grant_has_the_whole_lease(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", wait=2.0, inbox="p", lease=2)
    desk.release("r1")
    assert inbox.heard()
    assert desk.backend.inspect("a").holds[0].remaining <= 2

    desk.fence("r2", wait=2.0, inbox="p", lease=30)

    assert desk.backend.inspect("a").holds[0].remaining > 25
    assert desk.client.pttl(desk.keys.lock("a")) > 80_000


def test_a_repeated_command_that_acquires_has_the_whole_lease(desk):
    desk.fence("r1")
    desk.queue("r2", wait=2.0, inbox="nobody", lease=30)
    desk.release("r1")
    assert desk.holders() == []

    desk.fence("r2", wait=2.0, inbox="nobody", lease=30)

    assert desk.backend.inspect("a").holds[0].remaining > 25


def test_another_attempt_of_an_execution_that_holds_is_a_duplicate(desk):
    desk.fence("r1", label="worker 1")

    tag, ms, label = desk.raw("acquire", *claim_of(desk, "r1", "other", by_owner=1))

    assert (tag, label) == ("ATTEMPT", "- worker 1")
    assert 25_000 < ms <= 30_000
    assert isinstance(desk.acquire("r1", "other", wait=6.0), OtherAttempt)
    assert desk.waiters() == []


def test_another_attempt_of_an_execution_that_waits_is_a_duplicate(desk):
    desk.fence("r1")
    desk.queue("r2", label="worker 2")

    answer = desk.acquire("r2", "other", wait=6.0)

    assert isinstance(answer, OtherAttempt)
    assert answer.label == "worker 2"
    assert 5 < answer.remaining <= 6


def test_another_attempt_takes_over_when_the_first_has_lapsed(desk):
    fence = desk.fence("r1")
    assert isinstance(desk.acquire("r1", "other"), OtherAttempt)
    desk.lapse("r1")

    assert desk.fence("r1", "other") > fence
    assert not desk.release("r1")
    assert desk.holders() == ["r1"]


def test_another_attempt_takes_over_the_place_of_one_that_died_waiting(desk):
    desk.fence("r1")
    desk.queue("r2")
    desk.queue("r3")
    desk.lapse_place("r2")

    assert desk.queue("r2", "other", inbox="p") == 0
    assert desk.waiters() == ["r2", "r3"]
    inbox = desk.listen("p")
    desk.release("r1")
    assert [text.split(" ")[:3] for text in inbox.heard()] == [["granted", "r2", "other"]]


def test_an_attempt_that_does_not_wait_does_not_take_over_a_place(desk):
    desk.fence("r1")
    desk.queue("ahead")
    desk.queue("r2")
    desk.lapse_place("r2")

    assert isinstance(desk.acquire("r2", "other"), Conflict)
    assert not desk.release("r2", "other")
    assert desk.release("r2"), "it is still the first attempt's"


def test_an_execution_that_ended_is_told_so_whatever_the_attempt(desk):
    desk.fence("r1")
    desk.release("r1", ended="execution")

    for attempt_id in ("n", "other"):
        assert desk.raw("acquire", *claim_of(desk, "r1", attempt_id)) == ["ENDED"]
    assert desk.holders() == []
    assert isinstance(desk.acquire("r2"), Held)


def test_a_late_copy_of_an_attempt_that_ended_acquires_nothing_and_another_attempt_does(desk):
    desk.fence("r1")
    desk.release("r1", ended="attempt")

    assert desk.acquire("r1") == Ended()
    assert desk.raw("acquire", *claim_of(desk, "r1", "n")) == ["ENDED"]
    assert isinstance(desk.acquire("r1", "other"), Held)


def test_late_copies_of_several_attempts_acquire_nothing(desk):
    for attempt_id in ("n1", "n2", "n12"):
        desk.fence("r1", attempt_id)
        desk.release("r1", attempt_id, ended="attempt")

    assert [desk.acquire("r1", attempt_id) for attempt_id in ("n1", "n2", "n12")] == [Ended()] * 3
    assert isinstance(desk.acquire("r1", "n"), Held), "a part of an id is another id"


def test_a_lapsed_hold_is_out_of_the_way_to_the_millisecond(desk):
    desk.fence("r1", lease=1.0)
    assert isinstance(desk.acquire("r2"), Conflict)
    desk.wait_ms(1001)

    assert isinstance(desk.acquire("r2"), Held)
    assert desk.holders() == ["r2"]


def test_who_waits_may_be_any_text(desk):
    desk.fence("r1", label='"quoted" \\ {braces} é \n line')
    desk.queue("r2", label='"quoted" \\ {braces} é \n line')

    [hold] = desk.backend.inspect("a").holds
    assert hold.label == desk.place("r2")["label"] == '"quoted" \\ {braces} é \n line'
    assert isinstance(desk.acquire("r3", wait=6.0), Queued)
