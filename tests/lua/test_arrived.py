"""A message that a worker has received is not sent once more while that worker lives."""

from __future__ import annotations


def test_what_has_arrived_is_not_sent_again_until_its_worker_says_nothing_more(desk):
    desk.fence("r1")
    desk.park("r2")
    desk.release("r1")
    assert desk.out() == ["r2"]
    desk.backend.arrived(["r2", "unknown"], 60.0)
    assert 55_000 < desk.place("r2")["back"] - desk.now_ms() <= 60_000

    desk.backend.arrived(["r2"], 5.0)
    assert desk.place("r2")["back"] - desk.now_ms() > 50_000, "it is never due sooner"

    desk.lapse_place("r2", back=1)
    desk.backend.arrived(["r2"], 60.0)
    assert desk.place("r2")["back"] == 1, "what is late is sent again"
    desk.all_due()
    assert desk.resume() == ["r2"]


def test_what_still_waits_for_its_turn_is_not_touched(desk):
    desk.fence("r1")
    desk.park("r2")
    before = desk.place("r2")
    desk.backend.arrived(["r2"], 60.0)
    assert desk.place("r2") == before

    desk.release("r1")
    assert desk.out() == ["r2"]
