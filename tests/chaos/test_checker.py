"""The checker of histories, on histories that were made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.chaos.checker import STILL, WIPE, Write, check, entries_of, lost_updates
from tests.chaos.history import Fault, History, Visit, visits_of

LEASE = 10.0


def visit(
    name: str,
    asked: float,
    entered: float,
    left: float,
    fence: int,
    *,
    owner: str = "",
    trusted: float | None = None,
    outcome: str = "released",
    limit: int = 1,
    shared: bool = False,
    queued: float = math.inf,
) -> Visit:
    return Visit(
        id=name,
        lock="a",
        owner=owner or name,
        limit=limit,
        asked=asked,
        shared=shared,
        queued=queued,
        fence=fence,
        entered=entered,
        trusted=left if trusted is None else trusted,
        left=left,
        answered=left,
        outcome=outcome,
    )


def unknown(name: str, asked: float, owner: str) -> Visit:
    return Visit(id=name, lock="a", owner=owner, limit=1, asked=asked)


def refused(name: str, asked: float, answered: float, owner: str) -> Visit:
    left = unknown(name, asked, owner)
    left.answered, left.outcome = answered, "refused"
    return left


def wipe(began: float, ended: float) -> Fault:
    return Fault(WIPE, began, ended)


def rules(*visits: Visit, faults: tuple[Fault, ...] = ()) -> list[str]:
    return [found.rule for found in check(History([*visits], [*faults]), LEASE)]


GOOD: dict[str, tuple[Visit, ...]] = {
    "one after the other": (visit("x", 0, 1, 2, 5), visit("y", 0, 3, 4, 6)),
    "asked first but entered second": (visit("x", 0, 3, 4, 6), visit("y", 1, 2, 2.5, 5)),
    "frozen inside, told lost before it looked again": (
        visit("x", 0, 1, 9, 5, trusted=2, outcome="lost"),
        visit("y", 0, 3, 4, 6),
    ),
    "killed inside": (
        visit("x", 0, 1, math.inf, 5, trusted=2, outcome="in"),
        visit("y", 0, 3, 4, 6),
    ),
    "told lost as soon as it was in": (
        visit("x", 0, 5, 6, 5, trusted=-math.inf, outcome="lost"),
        visit("y", 0, 3, 7, 6),
    ),
    "the server could not be told of the end": (
        visit("x", 0, 1, 2, 5, outcome="unreleased"),
        visit("y", 0, 12, 13, 6),
    ),
    "an owner enters twice, with one fence": (
        visit("x", 0, 1, 6, 5, owner="o"),
        visit("y", 2, 3, 4, 5, owner="o"),
        visit("z", 2, 7, 8, 6),
    ),
    "two of one owner that overlap at the ends, and a stranger after both": (
        visit("x", 0, 1, 4, 5, owner="o"),
        visit("y", 2, 3, 8, 5, owner="o"),
        visit("z", 2, 9, 10, 6),
    ),
    "two in a lock for two": (
        visit("x", 0, 1, 5, 5, limit=2),
        visit("y", 0, 2, 6, 6, limit=2),
        visit("z", 0, 5.5, 7, 7, limit=2),
    ),
    "the maker of the entry died unheard, and the other place was taken before one joined": (
        unknown("maker", 0, "o"),
        visit("other", 1, 2, 9, 6, limit=2),
        visit("joiner", 3, 4, 8, 5, owner="o", limit=2),
    ),
}

BAD: dict[str, tuple[str, tuple[Visit, ...]]] = {
    "two at once": ("exclusion", (visit("x", 0, 1, 4, 5), visit("y", 0, 2, 3, 6))),
    "two at once for an instant": (
        "exclusion",
        (visit("x", 0, 1, 2.001, 5), visit("y", 0, 2, 3, 6)),
    ),
    "two at once, the later one in fence came first": (
        "exclusion",
        (visit("x", 0, 1, 4, 6), visit("y", 0, 2, 3, 5)),
    ),
    "the first one trusts its hold after the second one came": (
        "exclusion",
        (visit("x", 0, 1, 9, 5, trusted=3.5, outcome="lost"), visit("y", 0, 3, 4, 6)),
    ),
    "the first one died, but still trusted it": (
        "exclusion",
        (
            visit("x", 0, 1, math.inf, 5, trusted=3.5, outcome="in"),
            visit("y", 0, 3, 4, 6),
        ),
    ),
    "a release that went well after a stranger had come": (
        "exclusion",
        (visit("x", 0, 1, 4, 5, trusted=2), visit("y", 0, 3, 5, 6)),
    ),
    "a stranger between two visits of one entry": (
        "exclusion",
        (
            visit("x", 0, 1, 2, 5, owner="o"),
            visit("z", 0, 3, 4, 6),
            visit("y", 2, 5, 6, 5, owner="o"),
        ),
    ),
    "three in a lock for two": (
        "exclusion",
        (
            visit("x", 0, 1, 5, 5, limit=2),
            visit("y", 0, 2, 6, 6, limit=2),
            visit("z", 0, 3, 7, 7, limit=2),
        ),
    ),
    "a fence that goes down": ("order", (visit("x", 0, 1, 2, 6), visit("y", 3, 4, 5, 5))),
    "a fence that goes down, with others between": (
        "order",
        (visit("x", 0, 1, 2, 9), visit("m", 0, 3, 4, 10), visit("y", 3, 5, 6, 5)),
    ),
    "one fence for two owners": ("order", (visit("x", 0, 1, 2, 5), visit("y", 3, 4, 5, 5))),
    "re-entry refused": (
        "re-entry",
        (visit("x", 0, 1, 9, 5, owner="o"), refused("y", 2, 3, "o")),
    ),
    "re-entry with another fence": (
        "re-entry",
        (
            visit("x", 0, 1, 9, 5, owner="o", limit=2),
            visit("y", 2, 3, 4, 6, owner="o", limit=2),
        ),
    ),
}


@pytest.mark.parametrize("visits", GOOD.values(), ids=GOOD)
def test_a_good_history_passes(visits: tuple[Visit, ...]) -> None:
    assert rules(*visits) == []


@pytest.mark.parametrize(("rule", "visits"), BAD.values(), ids=BAD)
def test_a_bad_history_is_rejected(rule: str, visits: tuple[Visit, ...]) -> None:
    assert rule in rules(*visits)
    # The order in which the files of the processes are read says nothing.
    assert rule in rules(*reversed(visits))


def test_a_holder_that_an_emptied_server_forgot_may_overlap_until_it_is_told() -> None:
    forgotten = visit("x", 0, 1, 9, 5, trusted=7, outcome="lost")
    newcomer = visit("y", 0, 6, 8, 6)
    assert rules(forgotten, newcomer, faults=(wipe(3, 4),)) == []
    # Only that one may: who came after the loss is known to the server.
    assert rules(forgotten, newcomer, faults=(wipe(-2, -1),)) == ["exclusion"]
    assert rules(forgotten, newcomer, faults=(wipe(7, 8),)) == ["exclusion"]
    assert rules(forgotten, newcomer, faults=(Fault("kill -9", 3, 4),)) == ["exclusion"]


def test_a_forgotten_holder_that_is_not_told_within_a_lease_is_a_violation() -> None:
    forgotten = visit("x", 0, 1, 20, 5, trusted=15, outcome="lost")
    assert rules(forgotten, faults=(wipe(3, 4),)) == ["told"]


def test_a_lock_that_was_over_when_acquire_called_it_acquired_breaks_a_rule() -> None:
    late = visit("x", 0, 6, 7, 5, trusted=-math.inf, outcome="lost")
    late.told, late.until = 6.0, 5.0
    assert rules(late) == ["arrival"]
    late.until = 5.96
    assert rules(late) == [], "a thread may be put aside after its last look"
    late.until = 5.0
    for kind in ("SIGSTOP", STILL):
        assert rules(late, faults=(Fault(kind, 4.9, 5.9),)) == []


def test_lost_updates_are_writes_over_values_that_nobody_had_read() -> None:
    assert lost_updates([]) == 0
    assert lost_updates([Write("-", "a"), Write("a", "b"), Write("b", "c")]) == 0
    assert lost_updates([Write("-", "a"), Write("-", "b")]) == 1
    assert lost_updates([Write("-", "a"), Write("a", "b"), Write("a", "c"), Write("a", "d")]) == 2


def test_the_lines_of_a_process_become_visits_also_when_it_died_in_the_middle() -> None:
    asked: dict[str, Any] = {"event": "ask", "lock": "a", "owner": "o", "limit": 1}
    lines = [
        {**asked, "at": 1.0, "id": "x"},
        {"event": "in", "at": 2.0, "id": "x", "fence": 7},
        {"event": "trusted", "at": 2.5, "id": "x"},
        {"event": "leave", "at": 3.0, "id": "x"},
        {"event": "released", "at": 3.5, "id": "x"},
        {**asked, "at": 4.0, "id": "y"},
        {"event": "in", "at": 5.0, "id": "y", "fence": 8},
        {**asked, "at": 6.0, "id": "z"},
        {**asked, "at": 7.0, "id": "r"},
        {"event": "refused", "at": 8.0, "id": "r"},
    ]
    visits = visits_of(lines)
    x = visits[0]
    assert (x.asked, x.entered, x.trusted, x.left, x.fence) == (1.0, 2.0, 2.5, 3.0, 7)
    assert [each.outcome for each in visits] == ["released", "in", "unknown", "refused"]
    assert [entry.fence for entry in entries_of(visits)] == [7, 8]


def test_who_shares_a_lock_may_be_many_in_one_permit():
    first = visit("a", 0, 1, 5, 7, shared=True)
    assert rules(first, visit("b", 2, 3, 8, 7, shared=True)) == []
    assert rules(first, visit("b", 2, 3, 8, 7)) == ["sharing"]


def test_an_exclusive_visit_beside_one_that_shares_is_told():
    assert rules(visit("a", 0, 1, 5, 7, shared=True), visit("b", 2, 3, 8, 9)) == ["exclusion"]


def test_whoever_asks_while_another_one_waits_comes_after_it():
    holder = visit("a", 0, 1, 5, 7, shared=True)
    waits = visit("b", 1.5, 6, 7, 9, queued=2)
    late = visit("c", 3, 4, 5, 7, shared=True)
    assert rules(holder, waits, late) == ["turn"]
    assert rules(holder, visit("b", 1.5, 6, 7, 7, queued=2, shared=True), late) == []
    assert rules(holder, waits, visit("c", 1.9, 4, 5, 7, shared=True)) == [], "before it waited"
    for kind in ("SIGSTOP", STILL):
        assert rules(holder, waits, late, faults=(Fault(kind, 2.5, 2.6),)) == []


def test_who_re_enters_has_no_turn_to_wait_for():
    outer = visit("a", 0, 1, 5, 7, owner="o")
    waits = visit("b", 1.5, 6, 7, 9, queued=2)
    assert rules(outer, waits, visit("c", 3, 4, 5, 7, owner="o")) == []
    # The grant is old when its process hears of it: meanwhile another one of the owner has joined.
    slow = visit("a", 0, 4.5, 5, 7, owner="o", queued=0.5)
    assert rules(slow, waits, visit("c", 3, 4, 5, 7, owner="o")) == []
    assert rules(waits, visit("c", 3, 4, 5, 7, owner="o")) == ["turn"]
