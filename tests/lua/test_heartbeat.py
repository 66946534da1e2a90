"""heartbeat: places are kept, missed grants found, and what is over is said to be over."""

from __future__ import annotations

from celery_relock.engine.protocol import Held, Queued, Renewal


def renewals(desk, *claims):
    """The raw reply for (lock, execution, attempt, wait ms, lease ms)."""
    keys = [desk.keys.meta(), *(desk.keys.lock(claim[0]) for claim in claims)]
    reply = desk.raw("heartbeat", keys, [" ".join(map(str, claim[1:])) for claim in claims])
    return [line.split(" ") for line in reply]


def test_a_waiter_keeps_its_place_and_is_told_its_rank(desk):
    desk.fence("r1", lease=20)
    desk.queue("r2", wait=4.0)
    desk.queue("r3")

    [[tag, rank, ms]] = renewals(desk, ("a", "r2", "n", 6000, 30_000))

    assert (tag, rank) == ("WAIT", "0")
    assert 15_000 < int(ms) <= 20_000
    assert desk.place("r2")["expiry"] > desk.now_ms() + 5000
    assert desk.beat("r3").rank == 1


def test_a_grant_whose_message_was_missed_is_found_and_has_the_whole_lease(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", inbox="p", wait=2.0, lease=2.0)
    desk.release("r1")
    fence = int(inbox.heard()[0].split(" ")[3])
    assert desk.backend.inspect("a").holds[0].remaining <= 2

    assert renewals(desk, ("a", "r2", "n", 6000, 30_000)) == [["HELD", str(fence)]]
    assert 25 < desk.backend.inspect("a").holds[0].remaining <= 30


def test_a_waiter_that_looks_finds_a_lock_that_lapsed(desk):
    desk.fence("r1")
    desk.queue("r2", inbox="nobody")
    assert isinstance(desk.beat("r2"), Queued)
    desk.lapse("r1")

    assert isinstance(desk.beat("r2"), Held)
    assert desk.holders() == ["r2"]


def test_a_waiter_that_looks_grants_the_lock_to_who_is_ahead_of_it(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", inbox="p")
    desk.queue("r3", inbox="p")
    desk.lapse("r1")

    assert isinstance(desk.beat("r3"), Queued)
    assert desk.holders() == ["r2"]
    assert inbox.heard()[0].startswith("granted r2 ")


def test_a_place_that_ran_out_is_lost(desk):
    desk.fence("r1")
    desk.queue("r2")
    assert isinstance(desk.beat("r2"), Queued)
    desk.lapse_place("r2")

    assert renewals(desk, ("a", "r2", "n", 6000, 30_000)) == [["LOST"]]
    assert renewals(desk, ("a", "nobody", "n", 6000, 30_000)) == [["LOST"]]


def test_another_attempt_has_no_place_and_keeps_none(desk):
    desk.fence("r1")
    desk.queue("r2", "mine", wait=2.0)

    assert desk.beat("r2", "other") is None
    assert desk.place("r2")["expiry"] <= desk.now_ms() + 2000


def test_another_attempt_has_no_hold_and_extends_none(desk):
    desk.fence("r1", "mine", lease=2.0)

    assert desk.beat("r1", "other") is None
    assert desk.backend.inspect("a").holds[0].remaining <= 2


def test_a_grant_that_ran_out_is_lost_and_not_brought_back(desk):
    desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", inbox="p", wait=0.05, lease=0.05)
    desk.release("r1")
    desk.wait_ms(51)

    assert desk.beat("r2") is None
    assert desk.holders() == []


def test_a_hold_is_never_made_shorter(desk):
    desk.fence("r1", lease=30)

    assert isinstance(desk.beat("r1", lease=1.0), Held)
    assert desk.backend.inspect("a").holds[0].remaining > 25


def test_all_places_of_a_call_are_kept_before_anybody_acquires(desk):
    inbox = desk.listen("p")
    desk.fence("r1")
    desk.queue("r2", inbox="p", wait=6.0)
    desk.queue("r3", inbox="p", wait=6.0)
    desk.lapse("r1")

    # r3 is looked after first; r2, ahead of it, acquires with the life that this call gave it.
    answers = desk.backend.heartbeat(
        [Renewal("a", "r3", "n", 30.0, 20.0), Renewal("a", "r2", "n", 30.0, 20.0)]
    )

    assert isinstance(answers[0], Queued)
    assert isinstance(answers[1], Held)
    assert desk.holders() == ["r2"]
    assert len(inbox.heard()) == 1


def test_locks_of_one_call_do_not_mix(desk):
    desk.fence("r1", names=("a",))
    desk.fence("r2", names=("b",))
    desk.queue("r3", names=("a",))
    desk.queue("r4", names=("b",))
    desk.lapse("r2", "b")

    reply = renewals(
        desk,
        ("a", "r3", "n", 6000, 30_000),
        ("b", "r4", "n", 6000, 30_000),
        ("b", "r3", "n", 6000, 30_000),
    )

    assert [line[0] for line in reply] == ["WAIT", "HELD", "LOST"]


def test_a_heartbeat_sent_twice_says_the_same(desk):
    desk.fence("r1")
    desk.queue("r2")
    desk.lapse("r1")
    first = renewals(desk, ("a", "r2", "n", 6000, 30_000))

    assert renewals(desk, ("a", "r2", "n", 6000, 30_000)) == first
    assert first[0][0] == "HELD"


def test_a_place_with_a_short_life_does_not_shorten_the_queues(desk):
    desk.fence("r1")
    desk.queue("patient", wait=600.0)
    desk.queue("brief", wait=1.0)
    desk.beat("brief", wait=1.0)

    for key in (desk.keys.of_lock("q", "a"), desk.keys.of_lock("w", "a")):
        assert 600_000 < desk.client.pttl(key) <= 660_000
