"""Says of a history whether it could come from a correct lock. Pure: no Redis, no clock.

What is demanded, with the words of `docs/reliability.md`:

- order: an entry that begins after another one had begun has the higher fence;
- exclusion: never more entries at one time than the limit. An entry lasts from the first return of
  `acquire` with its fence to the last moment at which one of its holders looked and was not told
  "lost". A frozen or dead holder does not look, so it needs no exemption. The one exemption: a
  server that came back empty has forgotten its holders, and can tell them only when they renew;
- told: after such a loss every holder knows within one lease;
- arrival: `acquire` calls no lock acquired whose lease is over already;
- re-entry: an owner that is in is never refused, and has one fence;
- sharing: who shares a lock has an entry together with others that do, and with nobody else;
- turn: while nothing is done to the system, whoever asks after another one waits already gets the
  lock after it; but for two that share it;
- update: a register's every write replaces the value that its writer had read.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.chaos.history import Fault, History, Visit

WIPE, FREEZE = "restart without data", "SIGSTOP"
# Not done by a campaign: the machine had no time for anybody.
STILL = "the machine stood still"
# These hurt no place in a queue. After the others a place may be lost for so long, in seconds.
_HARMLESS, _AFTER = ("SCRIPT FLUSH",), 3.0
# A thread may be put aside for so long, in seconds, between its last look and what it says next.
_ASIDE = 0.05


@dataclass(frozen=True)
class Violation:
    rule: str
    lock: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: lock {self.lock!r}: {self.text}"


@dataclass(frozen=True)
class Entry:
    """All visits with one fence of one lock.

    `asked` is the earliest call that can have made it; `first` and `last` bound the time in which
    somebody saw it live.
    """

    lock: str
    fence: int
    owners: frozenset[str]
    shared: frozenset[bool]
    limit: int
    asked: float
    first: float
    last: float
    visits: tuple[str, ...]

    def __str__(self) -> str:
        return f"fence {self.fence} ({', '.join(self.visits)}; {self.first:.4f} to {self.last:.4f})"


def check(history: History, lease: float) -> list[Violation]:
    """Every rule that the history breaks. `lease`: seconds, the longest of any hold in it."""
    found: list[Violation] = []
    wipes = [fault for fault in history.faults if fault.kind == WIPE]
    by_lock: dict[str, list[Visit]] = defaultdict(list)
    for visit in history.visits:
        by_lock[visit.lock].append(visit)
    for visits in by_lock.values():
        entries = entries_of(visits)
        found += _one_owner(entries)
        found += _order(entries)
        found += _exclusion(entries, wipes)
        found += _told(visits, wipes, lease)
        found += _arrival(visits, [each for each in history.faults if each.kind in (FREEZE, STILL)])
        found += _reentry(visits, entries, wipes, lease)
        found += _turn(
            visits, entries, [each for each in history.faults if each.kind not in _HARMLESS]
        )
    return found


def _arrival(visits: Sequence[Visit], freezes: Sequence[Fault]) -> list[Violation]:
    def frozen(at: float) -> bool:
        return any(each.began <= at + _ASIDE and at <= each.ended for each in freezes)

    return [
        Violation("arrival", each.lock, f"{each.id} was over for {each.told - each.until:.2f} s")
        for each in visits
        if math.inf > each.told > each.until + _ASIDE and not frozen(each.until)
    ]


def entries_of(visits: Sequence[Visit]) -> list[Entry]:
    """The entries of one lock in the order of their fences."""
    by_fence: dict[int, list[Visit]] = defaultdict(list)
    for visit in visits:
        if visit.fence:
            by_fence[visit.fence].append(visit)
    unknown = [visit for visit in visits if visit.outcome == "unknown"]
    return [_entry(fence, by_fence[fence], unknown) for fence in sorted(by_fence)]


def _entry(fence: int, visits: list[Visit], unknown: list[Visit]) -> Entry:
    owners = frozenset(visit.owner for visit in visits)
    shared = frozenset(visit.shared for visit in visits)
    # Whoever made it may have died before it could say so; those who joined it asked later.
    makers = [*visits]
    makers += (each for each in unknown if each.owner in owners or (each.shared and True in shared))
    return Entry(
        lock=visits[0].lock,
        fence=fence,
        owners=owners,
        shared=shared,
        limit=visits[0].limit,
        asked=min(visit.asked for visit in makers),
        first=min(visit.entered for visit in visits),
        last=max(_certain_until(visit) for visit in visits),
        visits=tuple(visit.id for visit in visits),
    )


def _certain_until(visit: Visit) -> float:
    # A release that went well says that the hold was there until it was called.
    return visit.left if visit.outcome == "released" else visit.trusted


def _one_owner(entries: Iterable[Entry]) -> Iterable[Violation]:
    for entry in entries:
        if len(entry.shared) > 1:
            yield Violation("sharing", entry.lock, f"some alone and some not share {entry}")
        if len(entry.owners) > 1 and True not in entry.shared:
            yield Violation(
                "order", entry.lock, f"owners {sorted(entry.owners)} share the entry {entry}"
            )


def _order(entries: Sequence[Entry]) -> Iterable[Violation]:
    """Entries by fence: none was entered before one with a lower fence was even asked for."""
    earliest: Entry | None = None
    for entry in reversed(entries):
        if earliest is not None and earliest.first < entry.asked:
            text = f"{earliest} began before anybody asked for the lower {entry}"
            yield Violation("order", entry.lock, text)
        if earliest is None or entry.first < earliest.first:
            earliest = entry


def _exclusion(entries: Sequence[Entry], wipes: Sequence[Fault]) -> Iterable[Violation]:
    live: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.first):
        live = [other for other in live if other.last > entry.first]
        beside = [other for other in live if not _forgotten(other, entry, wipes)]
        if entry.last > entry.first:
            live.append(entry)
            if len(beside) >= entry.limit:
                others = "; ".join(map(str, beside))
                text = f"{entry} began while the limit of {entry.limit} was reached by {others}"
                yield Violation("exclusion", entry.lock, text)


def _forgotten(earlier: Entry, later: Entry, wipes: Iterable[Fault]) -> bool:
    return any(earlier.asked <= wipe.ended and wipe.began <= later.first for wipe in wipes)


def _told(visits: Iterable[Visit], wipes: Sequence[Fault], lease: float) -> Iterable[Violation]:
    for visit in visits:
        for wipe in wipes:
            late = visit.trusted - (wipe.ended + lease)
            if visit.entered < wipe.began and late > 0:
                text = f"{visit.id} still trusted its hold {late:.3f} s after it had to be told"
                yield Violation("told", visit.lock, text)


def _reentry(
    visits: Iterable[Visit], entries: Sequence[Entry], wipes: Sequence[Fault], lease: float
) -> Iterable[Violation]:
    for visit in visits:
        if visit.outcome not in ("refused", "in", "released", "lost", "unreleased"):
            continue
        until = visit.answered if visit.outcome == "refused" else visit.entered
        for entry in entries:
            if True in entry.shared:
                continue  # it is there as long as anybody shares the lock
            inside = entry.first < visit.asked and until < entry.last
            wiped = any(w.began < until and visit.asked < w.ended + lease for w in wipes)
            if visit.owner in entry.owners and inside and visit.fence != entry.fence and not wiped:
                what = f"got fence {visit.fence}" if visit.fence else "was refused"
                text = f"{visit.id} {what} while its owner {visit.owner!r} was in by {entry}"
                yield Violation("re-entry", visit.lock, text)


def _turn(
    visits: Sequence[Visit], entries: Iterable[Entry], faults: Sequence[Fault]
) -> Iterable[Violation]:
    """Only where one that was let in keeps the other one out until it has left."""
    of_fence = {entry.fence: entry for entry in entries}
    inside = [
        each
        for each in sorted(visits, key=lambda visit: visit.entered)
        # Who re-enters waits for nobody.
        if each.limit == 1
        and each.fence
        and (each.shared or each.entered == of_fence[each.fence].first)
    ]
    for first in (each for each in inside if each.queued < math.inf):
        for late in inside:
            if late.entered >= first.entered:
                break
            calm = not any(
                fault.began < late.entered and first.queued < fault.ended + _AFTER
                for fault in faults
            )
            # Who re-enters can be in before the one that made the entry knows that it is.
            asked = late.asked if late.shared else of_fence[late.fence].asked
            if calm and asked > first.queued and not (late.shared and first.shared):
                text = f"{late.id} asked {asked - first.queued:.3f} s after {first.id} waited"
                yield Violation("turn", first.lock, f"{text}, and was in before it")


@dataclass(frozen=True)
class Write:
    """A write to a register: the value that its writer had read, and the one it wrote."""

    read: str
    wrote: str


def lost_updates(writes: Iterable[Write], initial: str = "-") -> int:
    """How many writes replaced a value that their writer had not seen, in the register's order."""
    value, lost = initial, 0
    for write in writes:
        lost += write.read != value
        value = write.wrote
    return lost


def most_beside(visits: Iterable[Visit]) -> int:
    """How many shared a lock at one time, at the most."""
    shared = [v for v in visits if v.shared and v.entered < math.inf]
    moments = [(v.entered, 1) for v in shared]
    moments += [(max(_certain_until(v), v.entered), -1) for v in shared]
    return max(itertools.accumulate((step for _, step in sorted(moments)), initial=0))


def longest_wait(visits: Iterable[Visit]) -> float:
    """Seconds from asking to entering, at the most."""
    return max((v.entered - v.asked for v in visits if v.entered < math.inf), default=0.0)
