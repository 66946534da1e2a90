"""How much may be parked: messages of one lock; messages and bytes of all locks together (B12)."""

from __future__ import annotations

from celery_relock.engine.protocol import Full, Parked


def counted(desk):
    return [int(each or 0) for each in desk.client.hmget(desk.keys.meta(), "parked", "bytes")]


def test_a_lock_that_is_full_takes_no_more_and_the_others_do(desk):
    desk.fence("r1", names=("a",))
    desk.fence("r2", names=("b",))
    assert isinstance(desk.leave("r3", names=("a",), most=1), Parked)
    assert desk.leave("r4", names=("a",), most=1) == Full("a", 1)
    assert isinstance(desk.leave("r4", names=("b",), most=1), Parked)
    assert isinstance(desk.leave("r3", "n2", names=("a",), most=1), Parked), "again"


def test_all_locks_together_have_a_bound_of_messages(desk):
    for name in "abc":
        desk.fence(f"holds {name}".replace(" ", "-"), names=(name,))
    assert isinstance(desk.leave("r1", names=("a",), text="12345", most_in_all=2), Parked)
    assert isinstance(desk.leave("r2", names=("a", "b"), text="67", most_in_all=2), Parked)
    assert desk.leave("r3", names=("c",), most_in_all=2) == Full("", 2, 7)
    for attempt in ("n", "n2"):
        again = desk.leave("r2", attempt, names=("a", "b"), text="67", most_in_all=2)
        assert isinstance(again, Parked), attempt
    assert counted(desk) == [2, 7]

    desk.withdraw("r1", remember=1)
    assert counted(desk) == [1, 2]
    assert isinstance(desk.leave("r3", names=("c",), text="", most_in_all=2), Parked)


def test_all_locks_together_have_a_bound_of_bytes(desk):
    desk.fence("r1")
    assert isinstance(desk.leave("r2", text="ü" * 10, most_bytes=30), Parked)
    assert desk.leave("r3", text="x" * 11, most_bytes=30) == Full("", 1, 20)
    assert isinstance(desk.leave("r4", text="x" * 10, most_bytes=30), Parked)


def test_what_a_server_has_evicted_is_not_counted_for_ever(desk):
    desk.fence("r1")
    desk.leave("r2")
    desk.client.delete(f"{desk.keys.prefix(0)}m:a")
    assert counted(desk) == [1, len("text of r2")]
    desk.release("r1", home="h")
    assert counted(desk) == [0, 0]


def test_a_message_whose_place_was_evicted_is_not_counted_for_ever(desk):
    desk.fence("r0")
    for run in ("r1", "r2"):
        desk.leave(run, text="x" * 10)
    desk.fence("s0", names=("b",))
    desk.leave("s1", names=("b",), text="x" * 5)
    desk.client.delete(desk.keys.of_lock("w", "a"))
    desk.backend.arrived(["r1", "r2"], 60.0)
    assert counted(desk) == [1, 5]
