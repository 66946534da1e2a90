"""A round's tasks and calls, all of them at random, from its seed alone.

Every process of a round makes the same workload, so a body finds by the id of its step what it has
to do. Names of locks have ranks, and nobody who holds one asks for another of a lower rank: a round
has no deadlock of its own making.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from celery_relock.errors import LockConfigError
from celery_relock.options import LockOptions

VARIABLE = "RELOCK_CHAOS_COMBINED"
#: Permits of the locks with more than one; in the order of their ranks.
LIMITS = {"x": 1, "lim": 2, "y": 1}
#: What may end otherwise than without locks, or even stay without an end: all of it, or its end.
ENDS_OTHERWISE = "may end otherwise"
STAYS_OPEN = "may stay open"
END_STAYS_OPEN = "its end may stay open"


# What options name. The library finds arguments by their names.


def name_x(key: str) -> str:
    return f"x:{key}"


def names_xy(key: str) -> list[str]:
    return [f"x:{key}", f"y:{key}"]


def limit_two(key: str) -> int:
    return 2


def mode_of(step: str) -> str:
    return "shared" if sum(map(ord, step)) % 2 else "exclusive"


def waits(conflict: object) -> str:
    return "wait"


def blocks(conflict: object) -> str:
    return "block"


def retries(conflict: object) -> str:
    return "retry"


def drops(conflict: object) -> str:
    return "drop"


def owner_of(request: Any) -> str:
    return f"own-{request.root_id or request.id}"


def both(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    return {**later, "merged": [*(earlier.get("merged") or ()), earlier["step"]]}


@dataclass
class Declared:
    """A task, which is there twice: with its lock, and without as its twin.

    Attributes:
        families: of its lock names, which are `<family>:<key>`.
        loose: why its calls may end otherwise than those of its twin.
    """

    number: int
    families: tuple[str, ...] = ()
    permits: int = 1
    lock: dict[str, Any] = field(default_factory=dict)
    celery: dict[str, Any] = field(default_factory=dict)
    is_async: bool = False
    loose: set[str] = field(default_factory=set)

    @property
    def holds_on(self) -> bool:
        return self.lock.get("lock_hold") == "workflow"

    def locks(self, key: str, step: str) -> list[tuple[str, int, str]]:
        """Name, permits and mode of each lock that a step should have."""
        mode = self.lock.get("lock_mode", "exclusive")
        mode = mode_of(step) if callable(mode) else mode
        modes = mode if isinstance(mode, list) else [mode] * len(self.families)
        return [
            (f"{family}:{key}", LIMITS.get(family, self.permits), each)
            for family, each in zip(self.families, modes, strict=True)
        ]


@dataclass
class Step:
    """A call of a task. Its acts are what its body does, in turns."""

    id: str
    task: int
    key: str
    acts: list[tuple[Any, ...]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    immutable: bool = True
    links: list[Node] = field(default_factory=list)
    errbacks: list[Step] = field(default_factory=list)


@dataclass
class Canvas:
    """Of the kind `chain`, `group`, `chord`, `locked`, `starmap` or `chunks`."""

    kind: str
    parts: list[Node]
    body: Node | None = None
    key: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    errbacks: list[Step] = field(default_factory=list)


Node = Step | Canvas


@dataclass
class Item:
    """What the sender sends, `times` times with locks and as often without."""

    number: int
    node: Node
    pause: float
    loose: set[str]
    options: dict[str, Any] = field(default_factory=dict)
    times: int = 1
    by_name: bool = False
    revoked: dict[str, Any] | None = None
    revoked_after: float = 0.0


@dataclass
class Workload:
    tasks: list[Declared]
    items: list[Item]
    conf: dict[str, Any]
    arguments: list[str]

    def steps(self) -> Iterator[Step]:
        for item in self.items:
            yield from steps_of(item.node)


@dataclass(frozen=True)
class Round:
    seed: int
    pool: str = "prefork"
    kills: bool = False
    items: int = 20

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(vars(self))}

    @classmethod
    def from_environment(cls) -> Round:
        return cls(**json.loads(os.environ[VARIABLE]))

    def workload(self) -> Workload:
        return _Maker(self).make()


def inner(step: Step) -> Iterator[Node]:
    """The canvases in what a body does."""
    for _, *arguments in step.acts:
        yield from (each for each in arguments if isinstance(each, Step | Canvas))


def steps_of(node: Node | None) -> Iterator[Step]:
    """All steps of a canvas, those of its bodies and links with them."""
    if node is None:
        return
    if isinstance(node, Step):
        yield node
        nodes = [*inner(node), *node.links, *node.errbacks]
    else:
        nodes = [*node.parts, *node.errbacks, *([node.body] if node.body else [])]
    for each in nodes:
        yield from steps_of(each)


def order_of(node: Node) -> Iterator[tuple[str, str]]:
    """Pairs of steps of which the first has to have ended when the second begins."""
    if isinstance(node, Step):
        for each in inner(node):
            yield from order_of(each)
        return
    stages: list[list[Node]] = [node.parts]
    if node.kind == "chain":
        stages = [[part] for part in node.parts]
    elif node.body is not None:
        stages.append([node.body])
    for before, after in pairwise(stages):
        for last in (step for each in before for step in _edge(each, -1)):
            for first in (step for each in after for step in _edge(each, 0)):
                yield last, first
    for each in (each for stage in stages for each in stage):
        yield from order_of(each)


def _edge(node: Node, end: int) -> Iterator[str]:
    """The steps with which a canvas begins (0) or ends (-1). What replaces a step ends it."""
    if isinstance(node, Step):
        replaced = [act[1] for act in node.acts if act[0] == "replace"]
        if replaced and end:
            yield from _edge(replaced[0], end)
        else:
            yield node.id
    elif node.kind == "chain":
        yield from _edge(node.parts[end], end)
    elif node.body is not None and end:
        yield from _edge(node.body, end)
    else:
        for part in node.parts:
            yield from _edge(part, end)


def _has_tail(node: Node) -> bool:
    """Whether there is a chain of which Celery leaves the end open if a member of a group or chord
    in it fails: it lets the task fail that they have in common, and nobody behind that."""
    if isinstance(node, Step):
        return any(map(_has_tail, [*inner(node), *node.links]))
    parts = [*node.parts, *([node.body] if node.body else [])]
    if node.kind == "chain":
        for number, part in enumerate(node.parts):
            behind = node.parts[number + 1 :]
            is_one = len(behind) == 1 and isinstance(behind[0], Step) and not _is_chord(part)
            if behind and not is_one and not isinstance(part, Step):
                return True
    return any(map(_has_tail, parts))


def _is_chord(node: Node) -> bool:
    last = node
    while isinstance(last, Canvas) and last.kind in ("chain", "locked"):
        last = last.parts[-1]
    return isinstance(last, Canvas) and last.kind == "chord"


@dataclass(frozen=True, eq=False)
class _Choice:
    """An option, in how many of all cases it is given, and its values. `loose`: why it is not given
    in a tame round; `needs`: the option beside which alone it is."""

    name: str
    share: float
    values: tuple[Any, ...]
    loose: str = ""
    needs: str = ""
    pools: tuple[str, ...] = ("prefork", "threads", "gevent")


_WAITING = ("wait", "block", "retry", waits, blocks, retries)
_LOCK = [
    _Choice("lock_on_conflict", 0.4, _WAITING),
    _Choice("lock_on_conflict", 0.15, ("drop", "raise", drops), ENDS_OTHERWISE),
    _Choice("lock_max_wait", 0.15, (0.3, 1, 5), ENDS_OTHERWISE),
    _Choice("lock_ttl", 1, (3, 4, 6)),
    _Choice("lock_cooldown", 0.15, (0.2, 0.7)),
    _Choice("lock_reentrant", 0.35, ("descendants", "descendants", "workflow")),
    _Choice("lock_owner", 0.3, ("task", "root", owner_of)),
    _Choice("lock_hold", 0.15, ("workflow",)),
    _Choice("lock_keep_on_retry", 0.3, (True,)),
    _Choice("lock_gap_ttl", 1, (5, 8)),
    _Choice("lock_on_gap", 0.4, ("raise",), ENDS_OTHERWISE, needs="lock_hold"),
    _Choice("lock_on_lost", 0.2, ("raise",), ENDS_OTHERWISE, pools=("prefork", "gevent")),
    _Choice("lock_order", 0.25, ("sent",)),
    _Choice("lock_order_gap", 1, (4, 6), needs="lock_order"),
    _Choice("lock_order_retry", 0.4, ("keep", "end"), needs="lock_order"),
    _Choice("lock_dedup", 0.25, ("until_start", "until_done", 0.7), ENDS_OTHERWISE),
    _Choice("lock_on_duplicate", 0.6, ("existing", "raise", "drop", "replace"), "", "lock_dedup"),
    _Choice("lock_debounce", 0.12, (0.2, 0.5), ENDS_OTHERWISE),
    _Choice("lock_debounce_max", 0.5, (1.0,), needs="lock_debounce"),
    _Choice("lock_debounce_reduce", 0.5, (both,), needs="lock_debounce"),
    _Choice("lock_max_parked", 0.08, (1, 2, 3), ENDS_OTHERWISE),
]
_CELERY = [
    _Choice("acks_late", 0.6, (True,)),
    _Choice("reject_on_worker_lost", 0.6, (True,), needs="acks_late"),
    _Choice("acks_on_failure_or_timeout", 0.06, (False,), ENDS_OTHERWISE),
    _Choice("autoretry_for", 0.5, ((ValueError,), (Exception,))),
    _Choice("default_retry_delay", 1, (0.05, 0.3), needs="autoretry_for"),
    _Choice("retry_backoff", 1, (False, False, True), needs="autoretry_for"),
    _Choice("retry_backoff_max", 1, (1,), needs="autoretry_for"),
    _Choice("max_retries", 0.4, (1, 2, 4)),
    _Choice("time_limit", 0.12, (1.5, 2.5), ENDS_OTHERWISE, pools=("prefork", "gevent")),
    _Choice("soft_time_limit", 0.12, (1.6, 2.5), ENDS_OTHERWISE, pools=("prefork",)),
    _Choice("rate_limit", 0.15, ("5/s", "10/s", "20/s")),
    _Choice("ignore_result", 0.08, (True,)),
    _Choice("expires", 0.03, (1, 3), STAYS_OPEN),
    _Choice("priority", 0.2, (0, 3, 9)),
    _Choice("typing", 0.15, (False,)),
    _Choice("track_started", 0.2, (True,)),
    _Choice("store_errors_even_if_ignored", 0.15, (True,)),
]
_SIGNATURE = [
    _Choice("countdown", 0.12, (0.1, 0.6, 1.2)),
    _Choice("expires", 0.02, (0.3, 1, 3), STAYS_OPEN),
    _Choice("priority", 0.1, (0, 5, 9)),
    _Choice("queue", 0.1, ("other",)),
    _Choice("ignore_result", 0.02, (True,)),
    _Choice("lock_on_conflict", 0.08, ("wait", "block", "retry", "drop", "raise"), ENDS_OTHERWISE),
    _Choice("lock_max_wait", 0.08, (0.3, 2), ENDS_OTHERWISE),
    _Choice("lock_ttl", 0.06, (3, 4)),
    _Choice("lock_keep_on_retry", 0.05, (True, False)),
    _Choice("lock_cooldown", 0.05, (0.3,)),
    _Choice("lock_dedup", 0.06, ("until_start", "until_done", 0.5, False), ENDS_OTHERWISE),
]
_LOCKED = [
    _Choice("ttl", 1, (3, 4)),
    _Choice("gap_ttl", 1, (5, 8)),
    _Choice("on_conflict", 0.3, ("wait", "block", "retry")),
    _Choice("on_conflict", 0.1, ("drop", "raise"), ENDS_OTHERWISE),
    _Choice("on_gap", 0.15, ("raise",), ENDS_OTHERWISE),
    _Choice("max_wait", 0.15, (0.5, 3), ENDS_OTHERWISE),
]
_CONF = [
    _Choice("relock_reentrant", 0.1, ("descendants", "workflow")),
    _Choice("relock_owner", 0.1, ("task",)),
    _Choice("relock_keep_on_retry", 0.1, (True,)),
    _Choice("relock_cooldown", 0.1, (0.2,)),
    _Choice("relock_on_conflict", 0.1, ("block", "retry")),
    _Choice("relock_order", 0.1, ("sent",)),
    _Choice("relock_order_gap", 1, (4,), needs="relock_order"),
    _Choice("relock_dedup", 0.1, ("until_start",), ENDS_OTHERWISE),
    _Choice("task_track_started", 0.1, (True,)),
    _Choice("task_serializer", 0.1, ("pickle",)),
    _Choice("task_compression", 0.1, ("gzip",)),
    _Choice("worker_cancel_long_running_tasks_on_connection_loss", 0.1, (True,)),
    _Choice("task_default_priority", 0.1, (3,)),
    _Choice("task_queue_max_priority", 0.3, (9,)),
    _Choice("worker_prefetch_multiplier", 1, (1, 2, 4)),
]
_ARGUMENTS = [
    _Choice("--max-tasks-per-child", 0.3, ("1", "2", "5"), pools=("prefork",)),
    _Choice("--autoscale", 0.2, ("4,1",), pools=("prefork",)),
    _Choice("-O", 0.3, ("fair",), pools=("prefork",)),
]


class _Maker:
    def __init__(self, of: Round) -> None:
        self._random = random.Random(of.seed)
        self._round = of
        # What every call of it has to do is what its twin does.
        self._tame = self._chance(0.3)
        # Rounds differ in what is frequent: what is rare meets what else is rare.
        self._shares: dict[_Choice, float] = {}
        others = ("chain", "group", "chord", "locked", "locked")
        self._kinds = ["step"] * 6 + ["map"]
        self._kinds += [kind for kind in others for _ in range(self._one(0, 2, 4, 6))]
        self._tasks: list[Declared] = []
        # Of the item that is being made: why it may end otherwise, what its workflow holds, how
        # many more steps it can have.
        self._item, self._key = 0, ""
        self._loose: set[str] = set()
        self._kept: set[str] = set()
        self._steps = self._budget = 0
        self._in_chord = self._may_ignore = False

    def make(self) -> Workload:
        for number in range(self._one(3, 5, 7)):
            self._tasks.append(self._task(number))
        conf, loose = self._conf()
        arguments = [word for pair in self._chosen(_ARGUMENTS)[0].items() for word in pair]
        items = [self._make_item(number) for number in range(self._round.items)]
        for item in items:
            item.loose |= loose
        return Workload(self._tasks, items, conf, arguments)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _one(self, *values: Any) -> Any:
        return self._random.choice(values)

    def _chosen(self, choices: list[_Choice]) -> tuple[dict[str, Any], set[str]]:
        """Options, and why what has them may end otherwise."""
        found: dict[str, Any] = {}
        loose: dict[str, str] = {}
        for each in choices:
            possible = self._round.pool in each.pools and not (each.loose and self._tame)
            needed = not each.needs or each.needs in found
            if possible and needed and self._chance(self._share(each)):
                found[each.name] = self._one(*each.values)
                loose[each.name] = each.loose
        return found, {*loose.values()} - {""}

    def _conf(self) -> tuple[dict[str, Any], set[str]]:
        conf, loose = self._chosen(_CONF)
        if "relock_order" in conf:
            conf.pop("relock_reentrant", None)  # the app's own defaults are not to contradict
        if self._round.kills:  # also what sends steps, as `celery.starmap`
            conf |= {"task_acks_late": True, "task_reject_on_worker_lost": True}
        if "task_serializer" in conf:
            conf["accept_content"] = ["pickle", "json"]
        return conf, loose

    def _share(self, choice: _Choice) -> float:
        if choice.share == 1:
            return 1
        often = 0.7 if choice.loose != STAYS_OPEN else choice.share
        shares = (0, choice.share, choice.share, choice.share, often)
        return self._shares.setdefault(choice, self._one(*shares))

    # -- tasks

    def _task(self, number: int) -> Declared:
        made = Declared(number, is_async=self._chance(0.15))
        kinds = ("x", "x", "x", "xy", "y", "lim", "xl", "own", "own", "task", "none", "false")
        kind = self._one(*kinds)
        key, made.families = {
            "x": (self._one("x:{key}", "x:{key}", name_x), ("x",)),
            "xy": (self._one(["x:{key}", "y:{key}"], names_xy, [name_x, "y:{key}"]), ("x", "y")),
            "y": ("y:{key}", ("y",)),
            "lim": ("lim:{key}", ("lim",)),
            "xl": (["x:{key}", "lim:{key}"], ("x", "lim")),
            "own": (f"own{number}:{{key}}", (f"own{number}",)),
            "task": ("{task}:{key}", (f"t{number}",)),
            "none": (None, ()),
            "false": (False, ()),
        }[kind]
        options, _ = self._chosen(_LOCK)
        options["lock_key"] = key
        if key is None:
            options.pop("lock_debounce_reduce", None)  # it would change the name
        if key is names_xy:  # only a call shows that there are several, for which there is no order
            for name in ("lock_order_gap", "lock_order_retry"):
                options.pop(name, None)
            options["lock_order"] = None
        if kind in ("lim", "xl"):
            options["lock_limit"] = {
                "lim": self._one(2, limit_two),
                "xl": self._one([1, 2], {"lim:{key}": 2}),
            }[kind]
        elif kind in ("own", "task") and self._chance(0.3):
            made.permits = options["lock_limit"] = self._one(2, 3)
        elif made.families and self._chance(0.25):
            options["lock_mode"] = self._one("shared", "shared", mode_of)
            if isinstance(key, list) and self._chance(0.5):
                options["lock_mode"] = ["shared", "exclusive"]
            made.loose.add(ENDS_OTHERWISE)  # who shares it cannot call what needs it alone
        made.lock = self._legal(options)
        made.permits = made.lock.get("lock_limit", 1) if kind in ("own", "task") else 1
        made.celery, loose = self._celery()
        made.loose |= loose
        made.loose |= {
            each.loose for each in _LOCK if each.loose and made.lock.get(each.name) in each.values
        }
        return made

    def _celery(self) -> tuple[dict[str, Any], set[str]]:
        found, loose = self._chosen(_CELERY)
        if found.get("soft_time_limit", 0) > found.get("time_limit", 9):
            del found["soft_time_limit"]
        if "acks_on_failure_or_timeout" in found:
            found.pop("time_limit", None)  # such a message would come again without end
        if self._round.kills:
            found |= {"acks_late": True, "reject_on_worker_lost": True}
        return found, loose

    def _legal(self, options: dict[str, Any]) -> dict[str, Any]:
        """Without what contradicts the rest of it."""
        while True:
            try:
                LockOptions.collect(options, {}, "round")
                return options
            except LockConfigError:
                kept = ("lock_key", "lock_ttl", "lock_gap_ttl")
                names = [name for name in options if name not in kept]
                if isinstance(options["lock_key"], list) or options["lock_key"] == "lim:{key}":
                    names = [name for name in names if name != "lock_limit"]
                del options[self._one(*names)]

    # -- what may be called by whom

    def _rank(self, family: str) -> int:
        ranks = [*LIMITS]
        return ranks.index(family) if family in ranks else 3 + int(family.lstrip("ownt"))

    def _allowed(self, families: tuple[str, ...] | set[str], held: set[str]) -> bool:
        top = max(map(self._rank, held), default=-1)
        return all(each in held or self._rank(each) > top for each in families)

    def _callee(self, held: set[str], holds: bool) -> Declared | None:
        found = [
            each
            for each in self._tasks
            if self._allowed(each.families, held) and (holds or not each.holds_on)
        ]
        return self._one(*found) if found else None

    # -- calls

    def _make_item(self, number: int) -> Item:
        self._item, self._steps = number, 0
        self._key = self._one("a", "a", "b")
        self._kept, self._loose = set(), set()
        self._budget = self._one(1, 4, 7, 10)
        self._may_ignore = self._chance(0.3)
        node = self._canvas(set(), self._one(1, 2, 3, 3), top=True)
        while node is None:
            node = self._canvas(set(), 1, top=True)
        if self._loose and _has_tail(node):
            self._loose.add(END_STAYS_OPEN)
        item = Item(number, node, self._one(0, 0, 0.02, 0.1), self._loose)
        if isinstance(node, Step):
            item.by_name = self._chance(0.12)
            if self._chance(0.2):
                item.times = self._one(2, 3)
        if self._chance(0.15) and not self._has_burst(node):
            item.options["countdown"] = self._one(0.1, 0.5, 1.5)
        if not self._tame and self._chance(0.06):
            how = {"terminate": self._chance(0.5), "signal": self._one("SIGTERM", "SIGKILL")}
            item.revoked, item.revoked_after = how, self._one(0, 0.05, 0.4)
            self._loose |= {ENDS_OTHERWISE, STAYS_OPEN}
        return item

    def _has_burst(self, node: Node) -> bool:
        """Whether a call in it is sent when its burst is over, and so has no countdown."""
        return any("lock_debounce" in self._tasks[step.task].lock for step in steps_of(node))

    def _step(
        self, held: set[str], depth: int, *, holds: bool = False, inline: bool = False
    ) -> Step | None:
        declared = self._callee(held, holds)
        if declared is None:
            return None
        self._budget -= 1
        self._loose |= declared.loose
        made = Step(self._new_id(), declared.number, self._key, immutable=self._chance(0.6))
        made.acts = self._acts(declared, held | {*declared.families}, depth, inline)
        if inline:
            return made
        made.options = self._options(declared)
        if declared.celery.get("ignore_result") or made.options.get("ignore_result"):
            # Nothing is stored for a call that its lock ends.
            self._loose |= {STAYS_OPEN} if self._loose or not self._tame else set()
        if depth and self._budget > 0:
            if self._chance(0.1):
                link = self._canvas(held, depth - 1)
                made.links = [link] if link else []
            if self._chance(0.1):
                made.errbacks = self._errbacks()
        return made

    def _new_id(self) -> str:
        self._steps += 1
        return f"{self._item}.{self._steps}"

    def _errbacks(self) -> list[Step]:
        made = self._step(set(), 0)
        if made is None:
            return []
        made.immutable = True
        return [made]

    def _options(self, declared: Declared) -> dict[str, Any]:
        found, loose = self._chosen(_SIGNATURE)
        lock = {**declared.lock, **found}
        if declared.lock["lock_key"] is False:
            found = {name: value for name, value in found.items() if "lock_" not in name}
        if lock.get("lock_order_retry") == "end":
            found.pop("lock_keep_on_retry", None)
        if lock.get("lock_on_conflict") in ("drop", "raise"):
            found.pop("lock_max_wait", None)
        if declared.holds_on:
            found.pop("lock_cooldown", None)
        if lock.get("lock_debounce"):
            found.pop("countdown", None)
            found.pop("lock_dedup", None)
            if found.get("expires") == 0.3:  # it would be refused
                del found["expires"]
        self._loose |= loose
        return found

    def _acts(
        self, declared: Declared, held: set[str], depth: int, inline: bool
    ) -> list[tuple[Any, ...]]:
        acts = [self._sleep()]
        if depth and self._budget > 0 and self._chance(0.45):
            acts += [*self._calls(held, depth, inline), self._sleep()]
        if not self._tame and self._chance(0.06):
            acts += [("downgrade",), self._sleep()]
            self._loose.add(ENDS_OTHERWISE)
        if not inline:
            acts += self._end(declared, depth)
        return acts

    def _sleep(self) -> tuple[Any, ...]:
        return "sleep", self._one(0, 0.01, 0.05, 0.15)

    def _calls(self, held: set[str], depth: int, inline: bool) -> list[tuple[Any, ...]]:
        """What a body calls or sends, or a lock that it acquires by hand."""
        how = self._one("call", "call", "call", "apply", "send", "send", "send", "add", "by_hand")
        if how in ("call", "apply"):
            self._loose.add(ENDS_OTHERWISE)  # it waits in its slot, at most for a minute
            node: Node | None = self._step(held, depth - 1, inline=True)
        elif how == "send":
            node = self._canvas(set(), depth - 1)
            asks = self._one("", "", "", "", "get", "get", "" if self._tame else "revoke")
            if asks:
                self._loose |= {ENDS_OTHERWISE, *([STAYS_OPEN] if asks == "revoke" else [])}
            if node:
                countdown = 0 if self._has_burst(node) else self._one(0, 0, 0, 0.3)
                return [("send", node, countdown, asks)]
        elif how == "add" and self._in_chord and not inline:
            node = self._step(held, 0)
        else:
            return [("by_hand",)] if how == "by_hand" else []
        return [(how, node, self._chance(0.5))] if node else []

    def _end(self, declared: Declared, depth: int) -> list[tuple[Any, ...]]:
        limits = {"time_limit", "soft_time_limit"} & declared.celery.keys()
        if limits and self._chance(0.2):
            return [("sleep", 1.9)]
        if self._round.kills and self._chance(0.15):
            self._loose.add(ENDS_OTHERWISE)
            return [
                self._one(("kill",), ("kill",), ("kill_after", self._one(0, 0.003, 0.01, 0.05)))
            ]
        share = self._random.random()
        if share < 0.12:
            return [("retry", self._one(0, 0.1, 0.5), self._one(1, 2), None)]
        if share < 0.16:
            return [("retry", 0.1, 1, self._one("a", "b"))]
        if share < 0.26 and "autoretry_for" in declared.celery:
            return [("fail_until", self._one(1, 2, 5))]
        if share < 0.3:
            return [("fail", self._one(ValueError, KeyError))]
        if share < 0.32 and not self._tame:
            self._loose |= {ENDS_OTHERWISE, STAYS_OPEN}
            return [("ignore",)] if self._may_ignore else [("reject", self._chance(0.5))]
        if share < 0.44 and depth and self._budget > 0:
            node = self._canvas({*self._kept}, depth - 1)
            return [("replace", node)] if node else []
        return []

    # -- canvases

    def _canvas(self, held: set[str], depth: int, top: bool = False) -> Node | None:
        kind = self._one(*self._kinds) if depth > 0 else "step"
        if self._budget <= 0:
            return self._step(held, 0)
        before = {*self._kept}
        try:
            make = getattr(self, f"_make_{kind}")
            made: Node | None = make(held, depth, top)
            return made
        finally:
            self._kept = before

    def _make_step(self, held: set[str], depth: int, top: bool) -> Node | None:
        return self._step(held, depth)

    def _make_chain(self, held: set[str], depth: int, top: bool) -> Node | None:
        parts: list[Node] = []
        held = {*held}
        for _ in range(self._one(2, 3, 4)):
            alone = self._chance(0.4)
            part = (
                self._step(held, depth - 1, holds=top) if alone else self._canvas(held, depth - 1)
            )
            if part is None:
                continue
            parts.append(part)
            if isinstance(part, Step) and self._tasks[part.task].holds_on:
                held |= {*self._tasks[part.task].families}
                self._kept |= held
        if len(parts) < 2:
            return parts[0] if parts else None
        return Canvas("chain", parts, errbacks=self._errbacks() if self._chance(0.15) else [])

    def _several(self, held: set[str], depth: int) -> list[Node]:
        made = [self._canvas(held, depth - 1) for _ in range(self._one(1, 2, 3))]
        return [each for each in made if each]

    def _make_group(self, held: set[str], depth: int, top: bool) -> Node | None:
        parts = self._several(held, depth)
        return Canvas("group", parts) if parts else None

    def _make_chord(self, held: set[str], depth: int, top: bool) -> Node | None:
        before, self._in_chord = self._in_chord, True
        made = [self._step(held, depth - 1) for _ in range(self._one(1, 2, 3))]
        self._in_chord = before
        parts: list[Node] = [each for each in made if each]
        body = self._step(held, depth - 1) if self._chance(0.7) else self._canvas(held, depth - 1)
        return Canvas("chord", parts, body) if parts and body else body

    def _make_map(self, held: set[str], depth: int, top: bool) -> Node | None:
        declared = self._callee(held, False)
        if declared is None:
            return None
        self._loose |= declared.loose | {ENDS_OTHERWISE}  # inline, too
        parts: list[Node] = [
            Step(self._new_id(), declared.number, self._key, [("sleep", 0.02)]) for _ in range(2)
        ]
        return Canvas(self._one("starmap", "starmap", "chunks"), parts)

    def _make_locked(self, held: set[str], depth: int, top: bool) -> Node | None:
        family = self._one("x", "x", "y", "lim")
        if not self._allowed((family,), held):
            return self._step(held, depth)
        options, loose = self._chosen(_LOCKED)
        if options.get("on_conflict") in ("drop", "raise"):
            options.pop("max_wait", None)
        if LIMITS[family] > 1:
            options["limit"] = LIMITS[family]
        elif not self._tame and self._chance(0.05):
            options["mode"] = "shared"
            loose.add(ENDS_OTHERWISE)
        self._loose |= loose
        self._kept |= held | {family}
        part = self._canvas(held | {family}, depth - 1)
        key = f"{family}:{self._key}"
        return Canvas("locked", [part], key=key, options=options) if part else None
