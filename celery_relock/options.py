"""The options of a locked task: each declared once, with its default, unit and allowed values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

from .engine.protocol import LONGEST, MODES, SHARED
from .errors import LockConfigError
from .naming.callables import ByName, is_no_fault

# Seconds an execution can wait in its worker slot if lock_max_wait is not set.
_PATIENCE = 60.0
#: What an execution can do while somebody else holds the lock.
POLICIES = ("wait", "block", "retry", "drop", "raise")
#: Those by which an execution waits, and those by which its message is parked meanwhile.
WAITS, PARKS = ("wait", "block", "retry"), ("wait",)


# A check returns the value that the library uses, or raises ValueError.
Check: TypeAlias = Callable[[Any], Any]


def _either(*checks: Check) -> Check:
    """What the first check returns that accepts the value."""

    def check(value: Any) -> Any:
        for each in checks:
            try:
                return each(value)
            except ValueError:
                continue
        raise ValueError(value)

    return check


def _word(*words: str) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(value)
        return value

    return check


def _none(value: Any) -> None:
    if value is not None:
        raise ValueError(value)


def _off(value: Any) -> None:
    """None, or False, which turns the option off for a single call."""
    if value is not None and value is not False:
        raise ValueError(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _function(value: Any) -> Any:
    if not callable(value) or iscoroutinefunction(value):
        raise ValueError(value)
    return value


def _count(value: Any) -> int:
    """A whole number from 1, not a bool."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(value)
    return value


def _seconds(least: float, *, above: bool = False) -> Check:
    """Seconds, as a number or a timedelta: at least `least`, or with `above` more than that, and at
    most `LONGEST`."""

    def check(value: Any) -> float:
        number = value.total_seconds() if isinstance(value, timedelta) else value
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(value)
        if not least <= number <= LONGEST or (above and number == least):
            raise ValueError(value)
        return float(number)

    return check


def _key(value: Any) -> Any:
    """Check the type alone: `NameRule.compile` checks whether a lock_key fits the task."""
    parts = value if isinstance(value, list | tuple) else (value,)
    if value is None or value is False or all(map(_makes_names, parts)):
        return value
    raise ValueError(value)


def _limits(value: Any) -> Any:
    """A limit for each part of lock_key; `LockOptions.collect` checks that they fit the parts."""
    if isinstance(value, list | tuple) and value:
        return [_count(each) for each in value]
    if isinstance(value, Mapping) and value:
        return {part: _count(each) for part, each in value.items()}
    raise ValueError(value)


def _modes(value: Any) -> list[str]:
    """A mode for each part of lock_key."""
    if isinstance(value, list | tuple) and value:
        return [_word(*MODES)(each) for each in value]
    raise ValueError(value)


def _makes_names(part: Any) -> bool:
    return isinstance(part, str | staticmethod) or callable(part)


def _option(
    default: Any,
    doc: str,
    check: Check,
    *,
    allowed: str = "",
    values: Mapping[str, str] | None = None,
    when: str,
    example: str,
) -> Any:
    """Declare an option, with its texts for errors and for `docs/options.md`.

    Args:
        doc: what the option does, one sentence.
        check: converts a declared value into the value that the library uses.
        allowed: the values in words; by default the names in `values`.
        values: each value that needs an explanation, as code, with what it means.
        when: when to change it.
        example: lines of code.
    """
    values = values or {}
    says = {
        "doc": doc,
        "check": check,
        "allowed": allowed or ", ".join(each.replace('"', "'") for each in values),
        "values": values,
        "when": when,
        "example": example,
    }
    return field(default=default, metadata=says)


_CHARGE = """\
@app.task(base=LockedTask, lock_key="account:{account_id}"%s)
def charge(account_id, amount): ..."""


@dataclass(frozen=True, slots=True)
class LockOptions:
    """The options of a task, declared with `lock_<option>`, or on its app with `relock_<option>`.

    Times are in seconds. `collect` builds and checks the options of a task. `docs/options.md` is
    generated from these fields.
    """

    key: Any = _option(
        None,
        "The name of the lock: tasks with equal names exclude each other.",
        _key,
        allowed='a template such as "account:{account_id}", a callable, a list of these, None, '
        "False",
        values={
            '"account:{account_id}"': "a template over the arguments of the task; "
            "`{order.id}`, `{rows[0]}` and `{task}` work",
            "a callable": "called with the arguments that it names; returns the name",
            "a list of these": "several locks: the task acquires all of them or none",
            "None": "the name of the task and all its arguments",
            "False": "no lock",
        },
        when="Always. Name the resource, not the task. See [lock names](lock-names.md).",
        example=_CHARGE % "",
    )
    on_conflict: Any = _option(
        "wait",
        "What an execution does while another execution holds its lock.",
        _either(_word(*POLICIES), _function),
        allowed="'wait', 'block', 'retry', 'drop', 'raise', or a callable",
        values={
            '"wait"': "parks the message in Redis; the first to come is the first to run",
            '"block"': "waits in its worker slot, in the same queue",
            '"retry"': "sends the message again after a pause that grows from 0.25 s to 10 s",
            '"drop"': "ends without running; the result says so",
            '"raise"': "fails with `LockConflict`",
            "a callable": "gets the `LockConflict` and returns one of these words",
        },
        when='Use `"drop"` for periodic work that the next execution repeats anyway, `"block"` '
        "for bodies of milliseconds. See [what each answer means in a canvas](conflicts.md).",
        example="""\
@app.task(base=LockedTask, lock_key="index", lock_on_conflict="drop")
def rebuild_index(): ...""",
    )
    max_wait: float | None = _option(
        None,
        "Seconds an execution waits for its lock before it fails with `LockConflict`.",
        _either(_none, _seconds(0)),
        allowed="None, seconds from 0, or a timedelta, at most ten years",
        values={
            "None": "no limit for a task that is sent; 60 s in a worker slot",
            "seconds": "counted from the first delivery",
        },
        when="If a late execution is worse than a failed one.",
        example=_CHARGE % ", lock_max_wait=60",
    )
    ttl: float = _option(
        30.0,
        "The lease: seconds for which a lock outlives a holder whose machine is gone.",
        _seconds(0.5),
        allowed="seconds from 0.5, or a timedelta, at most ten years",
        when="Rarely. The worker renews the lease after every third of it, so a task can run "
        "for hours. Make it longer than a failover of your Redis takes.",
        example=_CHARGE % ", lock_ttl=60",
    )
    dedup: Any = _option(
        None,
        "When a second call for the same lock name is a duplicate, which is not sent.",
        _either(_off, _word("until_start", "until_done"), _seconds(0, above=True)),
        allowed="None, 'until_start', 'until_done', or seconds above 0, at most ten years",
        values={
            "None": "never; `False` for a single call",
            '"until_start"': "while an equal call is queued",
            '"until_done"': "while an equal call is queued or runs",
            "seconds": "for that long after an equal call was sent",
        },
        when="If callers send the same call more often than it has to run. See "
        "[duplicates](dedup.md).",
        example="""\
@app.task(base=LockedTask, lock_key="report:{customer_id}", lock_dedup="until_start")
def build_report(customer_id): ...""",
    )
    on_duplicate: str = _option(
        "existing",
        "What the caller of a duplicate gets.",
        _word("existing", "raise", "drop", "replace"),
        values={
            '"existing"': "the `AsyncResult` of the first call",
            '"raise"': "the error `DuplicateTask`, with the `task_id` of the first call",
            '"drop"': "an `EagerResult` that says that the call was dropped",
            '"replace"': "its own `AsyncResult`: the queued call is revoked, the new call is sent",
        },
        when='`"replace"` if the newest arguments must win.',
        example="""\
@app.task(base=LockedTask, lock_key="report:{customer_id}",
          lock_dedup="until_start", lock_on_duplicate="replace")
def build_report(customer_id, style): ...""",
    )
    debounce: float | None = _option(
        None,
        "Seconds without a call for the same lock name after which a burst of calls is sent as "
        "one.",
        _either(_off, _seconds(0, above=True)),
        allowed="None, seconds above 0, or a timedelta, at most ten years",
        values={
            "None": "each call is sent when it is made; `False` for a single call",
            "seconds": "calls wait in Redis; then the message of the last call is sent",
        },
        when="If calls come in bursts and one execution after the burst is enough. See "
        "[bursts](debounce.md).",
        example="""\
@app.task(base=LockedTask, lock_key="index:{shop}", lock_debounce=5, lock_debounce_max=60)
def rebuild(shop): ...""",
    )
    debounce_max: float | None = _option(
        None,
        "Seconds after its first call at which a burst is sent, even if calls still come.",
        _either(_none, _seconds(0, above=True)),
        allowed="None, seconds from lock_debounce, or a timedelta, at most ten years",
        values={"None": "ten times `lock_debounce`"},
        when="To limit how long a change waits for an execution while calls keep coming.",
        example="""\
@app.task(base=LockedTask, lock_key="index:{shop}", lock_debounce=5, lock_debounce_max=60)
def rebuild(shop): ...""",
    )
    debounce_reduce: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = _option(
        None,
        "Merges the arguments of a call with those of the calls before it in the burst.",
        _either(_none, _function),
        allowed="None, or a callable of two dicts",
        values={
            "None": "the arguments of the last call",
            "a callable": "gets two dicts of arguments by name, of the calls so far and of "
            "this call; returns such a dict",
        },
        when="If an execution needs something of each call. See "
        "[all arguments](debounce.md#the-arguments-of-all-calls).",
        example="""\
def both(earlier, later):
    return {**later, "ids": sorted({*earlier["ids"], *later["ids"]})}

@app.task(base=LockedTask, lock_key="index:{shop}", lock_debounce=5, lock_debounce_reduce=both)
def reindex(shop, ids): ...""",
    )
    limit: int | Callable[..., int] | list[int] | Mapping[Any, int] = _option(
        1,
        "How many permits the lock has: how many executions hold it at the same time.",
        _either(_count, _function, _limits),
        allowed="a whole number from 1, a callable of the arguments, a list with a number for "
        "each part of lock_key, or a dict of numbers by template",
        values={
            "a number": "for every name",
            "a callable": "called with the arguments that it names; returns the number",
            "a list": "a number for each part of `lock_key`, in its order",
            "a dict": "numbers by template; 1 for a template that it does not have",
        },
        when="To run at most N calls of an API, or N jobs of a tenant.",
        example="""\
@app.task(base=LockedTask, lock_key="api:{tenant}", lock_limit=5)
def call_api(tenant, path): ...""",
    )
    mode: Any = _option(
        "exclusive",
        "Whether an execution holds its lock alone or beside others that share it.",
        _either(_word(*MODES), _modes, _function),
        allowed="'exclusive', 'shared', a callable of the arguments, or a list with one of "
        "these words for each part of lock_key",
        values={
            '"exclusive"': "alone",
            '"shared"': "beside every other execution that shares the lock, but no exclusive "
            "execution; all that share it have one fencing token",
            "a callable": "called with the arguments that it names; returns one of these words",
            "a list": "a word for each part of `lock_key`, in its order",
        },
        when="If some tasks only read what others write. Both run in the order in which they "
        "asked, so neither starves. See [sharing a lock](conflicts.md#sharing-a-lock).",
        example="""\
@app.task(base=LockedTask, lock_key="account:{account_id}", lock_mode="shared")
def statement(account_id, month): ...""",
    )
    cooldown: float | None = _option(
        None,
        "Seconds for which the lock stays held after the task has succeeded.",
        _either(_none, _seconds(0, above=True)),
        allowed="None, seconds above 0, or a timedelta, at most ten years",
        when="If the work must not be repeated too soon. A failed, retried or revoked "
        "execution releases its lock at once. A call inside of a task that holds the lock has "
        "no cooldown of its own. For an execution that comes during the cooldown, "
        '`lock_on_conflict` decides: `"drop"` ends it, `"wait"` lets it run afterwards.',
        example="""\
@app.task(base=LockedTask, lock_key="feed:{url}", lock_cooldown=3600, lock_on_conflict="drop")
def fetch(url): ...""",
    )
    reentrant: str = _option(
        "inline",
        "Who can re-enter a lock that is held.",
        _word("inline", "descendants", "workflow"),
        values={
            '"inline"': "what the holder calls on its own call stack",
            '"descendants"': "also what a live holder has sent, at any depth; it runs beside "
            "the holder",
            '"workflow"': "every task of the same owner",
        },
        when="If a holder waits for the result of a task that it sends and that needs the same "
        "lock. See [re-entry](workflows.md).",
        example=_CHARGE % ', lock_reentrant="descendants"',
    )
    owner: Any = _option(
        "root",
        "Who owns the lock while the task holds it.",
        _either(_word("root", "task"), _function),
        allowed="'root', 'task', or a callable of the request",
        values={
            '"root"': "the workflow, by its `root_id`",
            '"task"': "the task, by its id",
            "a callable": "gets the request and returns the owner, a string",
        },
        when='Rarely. The owner decides who re-enters with `lock_reentrant="workflow"` or '
        '`"descendants"`.',
        example=_CHARGE % ', lock_owner="task"',
    )
    hold: str = _option(
        "task",
        "When the lock is released.",
        _word("task", "workflow"),
        values={
            '"task"': "when the task ends",
            '"workflow"': "when the chain of the task ends",
        },
        when="To hold a lock from one step of a chain to its end. For a whole canvas use "
        "[`locked`](workflows.md).",
        example="""\
@app.task(base=LockedTask, lock_key="account:{account_id}", lock_hold="workflow")
def reserve(account_id): ...""",
    )
    keep_on_retry: bool = _option(
        False,
        "Keep the lock through the countdown of `self.retry()`.",
        _flag,
        allowed="True or False",
        when="If no other task must run between two tries.",
        example="""\
@app.task(bind=True, base=LockedTask, lock_key="account:{account_id}", lock_keep_on_retry=True)
def settle(self, account_id): ...""",
    )
    gap_ttl: float = _option(
        300.0,
        "Seconds a workflow keeps its lock between two steps, or after a retry is due.",
        _seconds(0, above=True),
        allowed="seconds above 0, or a timedelta, at most ten years",
        when="If the next step can stand in its queue for longer than five minutes.",
        example="""\
@app.task(base=LockedTask, lock_key="import", lock_hold="workflow", lock_gap_ttl=3600)
def fetch(feed): ...""",
    )
    on_gap: str = _option(
        "tell",
        "What a step does if the lock of its workflow has ended.",
        _word("tell", "raise"),
        values={
            '"tell"': "logs a warning and acquires the lock anew; `self.lock.continuous` is False",
            '"raise"': "fails with `LockLost`",
        },
        when="If a workflow that was interrupted must not go on.",
        example="""\
@app.task(base=LockedTask, lock_key="import", lock_hold="workflow", lock_on_gap="raise")
def fetch(feed): ...""",
    )
    on_lost: str = _option(
        "flag",
        "What happens if the lease ends while the body still runs.",
        _word("flag", "raise"),
        values={
            '"flag"': "`self.lock.lost` becomes True and a warning is logged",
            '"raise"': "the body is interrupted with `LockLost`, in prefork, solo and gevent "
            "pools; refused in threads and eventlet pools",
        },
        when="If the body must not go on without its lock, and can be interrupted anywhere.",
        example=_CHARGE % ', lock_on_lost="raise"',
    )
    on_unavailable: str = _option(
        "raise",
        "What an execution does if Redis cannot be reached.",
        _word("raise", "retry", "run"),
        values={
            '"raise"': "fails with `LockUnavailable`",
            '"retry"': "is sent again later",
            '"run"': "runs without a lock, and logs an error",
        },
        when="If the work can wait for Redis, or matters more than the lock.",
        example=_CHARGE % ', lock_on_unavailable="retry"',
    )
    order: str | None = _option(
        None,
        "In which order the calls of one lock name run.",
        _either(_none, _word("sent")),
        allowed="None or 'sent'",
        values={
            "None": "in the order in which they reach a worker",
            '"sent"': "in the order in which they were sent; calls with a countdown or an ETA "
            "by when they are due",
        },
        when="If an update must not overtake the one before it. See [ordered processing per "
        "key](ordered.md).",
        example=_CHARGE % ', lock_order="sent"',
    )
    order_gap: float = _option(
        60.0,
        'Seconds for which `lock_order="sent"` waits for a message that is late.',
        _seconds(0, above=True),
        allowed="seconds above 0, or a timedelta, at most ten years",
        when="Longer, if a worker that prefetches can keep a message behind another task for "
        "more than a minute. Shorter, if a lost message must not hold up later calls for so "
        "long. The time counts from when the message has its turn and a later call has come; for a "
        "retry, anew with each message that was sent before the retry.",
        example=_CHARGE % ', lock_order="sent", lock_order_gap=600',
    )
    order_retry: str = _option(
        "keep",
        "Which place a retry has in the order.",
        _word("keep", "end"),
        values={
            '"keep"': "the place of its call: the calls behind it wait for the retry",
            '"end"': "behind the calls that were sent before the retry",
        },
        when="If a call that fails must not hold up the calls behind it.",
        example=_CHARGE % ', lock_order="sent", lock_order_retry="end"',
    )
    max_parked: int = _option(
        10_000,
        "How many messages can be parked for one lock. The next fails with `LockConflict`.",
        _count,
        allowed="a whole number from 1",
        when="To notice early that calls come faster than the lock lets them run.",
        example=_CHARGE % ", lock_max_parked=500",
    )
    #: The task's name, for messages.
    task: str = ""

    @classmethod
    def collect(
        cls, declared: Mapping[str, object], defaults: Mapping[str, object], where: str
    ) -> LockOptions:
        """The options of one task.

        Args:
            declared: the `lock_*` attributes of its class, by their full names.
            defaults: the app-wide defaults, by option name.
            where: the task's name.

        Raises:
            LockConfigError: an option is unknown or has an invalid value, or two options contradict
                each other. A default that contradicts what the task itself says gives way.
        """
        own: dict[str, Any] = {}
        for attribute, value in declared.items():
            name = attribute.removeprefix("lock_")
            if name not in OPTION_NAMES:
                raise LockConfigError(f"task {where}: {unknown(attribute, 'lock_')}")
            own[name] = _checked(name, value, attribute, f"task {where}")
        the_app = f"the app's settings ({where})"
        given = {n: _checked(n, v, f"relock_{n}", the_app) for n, v in defaults.items()}
        # What names the parts of a lock_key fits some tasks only.
        plain = {n: v for n, v in given.items() if not isinstance(v, list | Mapping)}
        cls(**{"key": "account:42", **plain})._check_together(the_app, {})
        used: dict[str, Any] = {}
        for name, value in given.items():
            options = cls(**{**used, name: value, **own})
            if not any(options._contradictions(declared)):
                used[name] = value
        options = cls(**{**used, **own}, task=where)
        options._check_together(f"task {where}", declared)
        return options

    def of_call(self, values: Mapping[str, object]) -> LockOptions:
        """A copy with the options that a single call sets.

        Args:
            values: the call's values, by option name.

        Raises:
            LockConfigError: an option is unknown, cannot be set by a call or has an invalid value,
                or two options contradict each other.
        """
        where = f"a call of {self.task}"
        for name in values:
            if name not in OPTION_NAMES:
                raise LockConfigError(f"{where}: {unknown(f'lock_{name}', 'lock_')}")
            if callable(values[name]):
                raise LockConfigError(
                    f"{where}: lock_{name} cannot be a callable here, because it travels in the "
                    "message. Declare the callable on the task."
                )
            if name not in CALL_OPTIONS:
                can = ", ".join(f"lock_{each}" for each in CALL_OPTIONS)
                raise LockConfigError(
                    f"{where}: lock_{name} belongs to the task, as all calls of a lock name "
                    f"must agree on it. Declare it there. A single call can have {can}."
                )
        new = {n: _checked(n, value, f"lock_{n}", where) for n, value in values.items()}
        options = replace(self, **new)
        options._check_together(where, {f"lock_{name}": value for name, value in new.items()})
        return options

    def _check_together(self, where: str, said: Mapping[str, object]) -> None:
        """Refuse options that contradict each other. `said` has the options that were set here: a
        default does not contradict."""
        for contradiction in self._contradictions(said):
            raise LockConfigError(f"{where}: {contradiction}")

    def _contradictions(self, said: Mapping[str, object]) -> Iterator[str]:
        yield from self._contradictions_of_waits(said)
        if self.mode != "exclusive" and self.limit != 1:
            yield (
                f"lock_limit={self.limit!r} says how many executions hold the lock side by side, "
                f"and lock_mode={self.mode!r} that any number can. Use one of them."
            )
        if self.cooldown and self.hold == "workflow":
            yield (
                f"lock_cooldown={self.cooldown:g} begins when the task has ended, and "
                "lock_hold='workflow' keeps the lock for the next step. Give the cooldown to the "
                "last step."
            )
        if callable(self.on_conflict) and self.hold == "workflow":
            yield (
                f"lock_on_conflict={self.on_conflict!r:.80} is a function, and "
                "lock_hold='workflow' tells the next steps in their messages what to do if the "
                "lock is theirs no more. Use one of the words."
            )
        if self.key is False and said.get("lock_dedup") is not None:
            yield (
                f"lock_dedup={self.dedup!r} needs a lock name to recognise duplicates, and "
                "lock_key=False gives none. Give the task a lock_key; lock_limit says how many "
                "executions can run side by side."
            )
        for name, (needed, example) in _NEEDS.items():
            value = getattr(self, name)
            unused = getattr(self, needed) is None and value != _DECLARED[name].default
            if unused and f"lock_{name}" in said:
                yield (f"lock_{name}={value!r:.80} is never used without lock_{needed}={example}.")
        yield from self._contradictions_of_bursts(said)
        yield from self._contradictions_of_parts()
        if self.order is not None:
            for what, is_so in self._out_of_order().items():
                if is_so:
                    yield f"lock_order='sent' excludes {what}."

    def _contradictions_of_waits(self, said: Mapping[str, object]) -> Iterator[str]:
        # Also such a task can wait for its turn, or for Redis.
        chosen_later = callable(self.on_conflict)
        waits = chosen_later or self.on_conflict in WAITS or self.order is not None
        waits = waits or self.on_unavailable == "retry"
        if not waits and said.get("lock_max_wait") and self.max_wait:
            yield (
                f"lock_max_wait={self.max_wait:g} is never used, because lock_on_conflict="
                f"{self.on_conflict!r} does not wait. To wait and then fail, use 'wait' or 'block'."
            )
        parks = chosen_later or self.on_conflict in PARKS
        if not parks and self.order is None and "lock_max_parked" in said:
            yield (
                f"lock_max_parked={self.max_parked} is never used, because lock_on_conflict="
                f"{self.on_conflict!r} parks no message. Only 'wait' and lock_order do."
            )

    def _contradictions_of_bursts(self, said: Mapping[str, object]) -> Iterator[str]:
        if self.key is False and said.get("lock_debounce"):
            yield (
                f"lock_debounce={self.debounce!r} needs a lock name to know which calls belong "
                "together, and lock_key=False gives none. Give the task a lock_key."
            )
        if self.debounce and self.debounce_max and self.debounce_max < self.debounce:
            yield (
                f"lock_debounce_max={self.debounce_max:g} is less than lock_debounce="
                f"{self.debounce:g}, so a burst would always end after it. Make it longer."
            )

    @property
    def _parts(self) -> list[Any]:
        return list(self.key) if isinstance(self.key, list | tuple) else [self.key]

    def _contradictions_of_parts(self) -> Iterator[str]:
        parts = self._parts
        for option, value, what in (
            ("limit", self.limit, "number"),
            ("mode", self.mode, "word"),
        ):
            if isinstance(value, list) and len(value) != len(parts):
                yield (
                    f"lock_{option}={value!r} has {len(value)} {what}s for {len(parts)} lock names "
                    f"in lock_key. Give one {what} for each name."
                )
        for part in self.limit if isinstance(self.limit, Mapping) else ():
            if part not in parts:
                yield (
                    f"lock_limit has a number for {part!r:.80}, which is not a part of "
                    f"lock_key={self.key!r:.200}."
                )

    def _out_of_order(self) -> dict[str, bool]:
        """What contradicts the order in which calls are sent, and whether the task asks for it."""
        return {
            "lock_key=False, which names nothing to keep an order for": self.key is False,
            "several names in lock_key: calls of each name would wait for the others'": (
                len(self._parts) > 1
            ),
            f"lock_limit={self.limit!r:.80}, which lets calls run side by side": self.limit != 1,
            f"lock_mode={self.mode!r:.80}, which lets calls run side by side": (
                self.mode != "exclusive"
            ),
            f"lock_reentrant={self.reentrant!r}, which lets a holder's own calls overtake": (
                self.reentrant != "inline"
            ),
            "lock_hold='workflow', whose next step stands behind calls that wait for the lock": (
                self.hold == "workflow"
            ),
            "lock_debounce, whose calls run when their burst is over": bool(self.debounce),
            "lock_order_retry='end', which lets calls pass that lock_keep_on_retry keeps out": (
                self.keep_on_retry and self.order_retry == "end"
            ),
        }

    def limit_of_parts(self, numbers: tuple[int, ...]) -> int:
        """The limit of a name that these parts of lock_key produce: the strictest of their
        limits."""
        if isinstance(self.mode, list):
            return SHARED if all(self.mode[number] == "shared" for number in numbers) else 1
        return min(map(self._limit_of_part, numbers))

    def _limit_of_part(self, number: int) -> int:
        if isinstance(self.limit, Mapping):
            return self.limit.get(self._parts[number], 1)
        assert isinstance(self.limit, list)
        return self.limit[number]

    @property
    def longest_burst(self) -> float:
        """Seconds from the first call of a burst to its latest possible end."""
        return self.debounce_max or 10 * (self.debounce or 0.0)

    @property
    def patience(self) -> float:
        """Seconds to wait in a worker slot (`"block"`, and every inline call). Parked and retried
        messages occupy no slot: without `max_wait` they wait without a bound."""
        return _PATIENCE if self.max_wait is None else self.max_wait

    def limit_for(self, arguments: Mapping[str, object]) -> int:
        """The limit for a call, or `SHARED`.

        Args:
            arguments: the call's arguments by name. A callable gets those that it names.

        Raises:
            LockConfigError: the callable failed, or returned an invalid value.
        """
        if self.mode != "exclusive":
            mode = self.mode
            if callable(mode):
                mode = self._called("mode", arguments, _word(*MODES), "'exclusive' or 'shared'")
            return SHARED if mode == "shared" else 1
        if isinstance(self.limit, int):
            return self.limit
        number: int = self._called("limit", arguments, _count, "a whole number from 1")
        return number

    def _called(
        self, option: str, arguments: Mapping[str, object], check: Check, allowed: str
    ) -> Any:
        """The value that the callable in an option returns for a call."""
        function = getattr(self, option)
        assert callable(function), "see Declaration.limits"
        where = f"task {self.task}: the callable in lock_{option}"
        try:
            return check(ByName(function, where)(arguments))
        except Exception as error:
            if is_no_fault(error):
                raise
            raise LockConfigError(
                f"{where} must return {allowed}, for the arguments that it names: {error!r}"
            ) from error


_DECLARED = {each.name: each for each in fields(LockOptions) if each.metadata}
# Options that are used only beside another one, and how that one can look. Not on_duplicate: it is
# also for a single call that asks for lock_dedup.
_NEEDS = {
    "debounce_max": ("debounce", "5"),
    "debounce_reduce": ("debounce", "5"),
    "order_gap": ("order", "'sent'"),
    "order_retry": ("order", "'sent'"),
}
OPTION_NAMES = tuple(_DECLARED)
#: The options that a single call can set: `apply_async(…, lock_max_wait=5)`. On the others
#: all calls of a lock name must agree.
CALL_OPTIONS = (
    *("on_conflict", "max_wait", "ttl", "dedup", "on_duplicate", "max_parked"),
    *("keep_on_retry", "on_lost", "on_unavailable", "cooldown"),
    *("debounce", "debounce_max"),
)


def unknown(written: str, prefix: str, others: tuple[str, ...] = ()) -> str:
    """The sentence about an unknown option, with the most similar name, or all names."""
    from difflib import get_close_matches

    names = (*others, *OPTION_NAMES)
    close = get_close_matches(written.removeprefix(prefix), names, n=1)
    every = ", ".join(prefix + name for name in names)
    hint = f"Did you mean {prefix}{close[0]}?" if close else f"There are: {every}."
    return f"there is no option {written}. {hint}"


def _checked(name: str, value: Any, written: str, where: str) -> Any:
    declared = _DECLARED[name].metadata
    try:
        return declared["check"](value)
    except ValueError:
        raise LockConfigError(
            f"{where}: {written}={value!r:.100} cannot be used. It takes {declared['allowed']}."
        ) from None
