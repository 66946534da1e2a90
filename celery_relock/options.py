"""The options of a locked task: each declared once, with its default, unit and allowed values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

from .engine.protocol import LONGEST, MODES, SHARED
from .errors import LockConfigError
from .naming.callables import by_name, called, read_signature

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


def that(fits: Callable[[Any], bool]) -> Check:
    """A value that fits, as it is."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(value)
        return value

    return check


def _word(*words: str) -> Check:
    return that(lambda value: isinstance(value, str) and value in words)


_none = that(lambda value: value is None)
flag = that(lambda value: isinstance(value, bool))
# A function of the arguments that it names: `naming.callables.by_name` checks them.
_callable = that(lambda value: callable(value) and not iscoroutinefunction(value))
# A whole number from 1, not a bool.
count = that(lambda value: isinstance(value, int) and value >= 1 and value is not True)


def _off(value: Any) -> None:
    """None, or False, which turns the option off for a single call."""
    if value is not None and value is not False:
        raise ValueError(value)


def _function(*arguments: str) -> Check:
    """A function that can be called with so many arguments."""

    def check(value: Any) -> Any:
        _callable(value)
        try:
            takes = read_signature(value)
        except ValueError:  # built in, and does not say what it takes
            return value
        try:
            takes.bind(*arguments)
        except TypeError:
            raise ValueError(value) from None
        return value

    return check


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


above_zero = _seconds(0, above=True)
SECONDS_ABOVE_0 = "seconds above 0, or a timedelta, at most ten years"


def _key(value: Any) -> Any:
    """Check the type alone: `NameRule.compile` checks whether a lock_key fits the task."""
    parts = value if isinstance(value, list | tuple) else (value,)
    if value is None or value is False or all(isinstance(p, str) or callable(p) for p in parts):
        return value
    raise ValueError(value)


def _limits(value: Any) -> Any:
    """A limit for each part of lock_key; `LockOptions.collect` checks that they fit the parts."""
    if isinstance(value, list | tuple) and value:
        return [count(each) for each in value]
    if isinstance(value, Mapping) and value:
        return {part: count(each) for part, each in value.items()}
    raise ValueError(value)


def _modes(value: Any) -> list[str]:
    """A mode for each part of lock_key."""
    if isinstance(value, list | tuple) and value:
        return [_word(*MODES)(each) for each in value]
    raise ValueError(value)


def _option(default: Any, check: Check, allowed: str) -> Any:
    """Declare an option.

    Args:
        check: converts a declared value into the value that the library uses.
        allowed: the values in words, for errors.
    """
    return field(default=default, metadata={"check": check, "allowed": allowed})


def _one_of(default: str, *others: str) -> Any:
    words = (default, *others)
    return _option(default, _word(*words), ", ".join(map(repr, words)))


@dataclass(frozen=True, slots=True)
class LockOptions:
    """The options of a task, declared with `lock_<option>`, or on its app with `relock_<option>`.

    Times are in seconds. `collect` builds and checks the options of a task. `docs/options.md` is
    the reference.
    """

    # The name of the lock: tasks with equal names exclude each other.
    key: Any = _option(
        None,
        _key,
        'a template such as "account:{account_id}", a callable, a list of these, None, False',
    )
    # What an execution does while another execution holds its lock.
    on_conflict: Any = _option(
        "wait",
        _either(_word(*POLICIES), _function("conflict")),
        f"{', '.join(map(repr, POLICIES))}, or a callable of the conflict",
    )
    # Seconds an execution waits for its lock before it fails with `LockConflict`.
    max_wait: float | None = _option(
        None, _either(_none, _seconds(0)), "None, seconds from 0, or a timedelta, at most ten years"
    )
    # The lease: seconds for which a lock outlives a holder whose machine is gone.
    ttl: float = _option(30.0, _seconds(0.5), "seconds from 0.5, or a timedelta, at most ten years")
    # When a second call for the same lock name is a duplicate, which is not sent.
    dedup: Any = _option(
        None,
        _either(_off, _word("until_start", "until_done"), above_zero),
        "None, 'until_start', 'until_done', or seconds above 0, at most ten years",
    )
    # What the caller of a duplicate gets.
    on_duplicate: str = _one_of("existing", "raise", "drop", "replace")
    # Seconds without a call for the same lock name after which a burst of calls is sent as one.
    debounce: float | None = _option(None, _either(_off, above_zero), f"None, {SECONDS_ABOVE_0}")
    # Seconds after its first call at which a burst is sent, even if calls still come.
    debounce_max: float | None = _option(
        None,
        _either(_none, above_zero),
        "None, seconds from lock_debounce, or a timedelta, at most ten years",
    )
    # Merges the arguments of a call with those of the calls before it in the burst.
    debounce_reduce: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = _option(
        None, _either(_none, _function("earlier", "later")), "None, or a callable of two dicts"
    )
    # How many permits the lock has: how many executions hold it at the same time.
    limit: int | Callable[..., int] | list[int] | Mapping[Any, int] = _option(
        1,
        _either(count, _callable, _limits),
        "a whole number from 1, a callable of the arguments, a list with a number for each part of "
        "lock_key, or a dict of numbers by template",
    )
    # Whether an execution holds its lock alone or beside others that share it.
    mode: Any = _option(
        "exclusive",
        _either(_word(*MODES), _modes, _callable),
        "'exclusive', 'shared', a callable of the arguments, or a list with one of these words for "
        "each part of lock_key",
    )
    # Seconds for which the lock stays held after the task has succeeded.
    cooldown: float | None = _option(None, _either(_none, above_zero), f"None, {SECONDS_ABOVE_0}")
    # Who can re-enter a lock that is held.
    reentrant: str = _one_of("inline", "descendants", "workflow")
    # Who owns the lock while the task holds it.
    owner: Any = _option(
        "root",
        _either(_word("root", "task"), _function("request")),
        "'root', 'task', or a callable of the request",
    )
    # When the lock is released.
    hold: str = _one_of("task", "workflow")
    # Keep the lock through the countdown of `self.retry()`.
    keep_on_retry: bool = _option(False, flag, "True or False")
    # Seconds a workflow keeps its lock between two steps, or after a retry is due.
    gap_ttl: float = _option(300.0, above_zero, SECONDS_ABOVE_0)
    # What a step does if the lock of its workflow has ended.
    on_gap: str = _one_of("tell", "raise")
    # What happens if the lease ends while the body still runs.
    on_lost: str = _one_of("flag", "raise")
    # What an execution does if Redis cannot be reached.
    on_unavailable: str = _one_of("raise", "retry", "run")
    # In which order the calls of one lock name run.
    order: str | None = _option(None, _either(_none, _word("sent")), "None or 'sent'")
    # Seconds for which `lock_order="sent"` waits for a message that is late.
    order_gap: float = _option(60.0, above_zero, SECONDS_ABOVE_0)
    # Which place a retry has in the order.
    order_retry: str = _one_of("keep", "end")
    # How many messages can be parked for one lock. The next fails with `LockConflict`.
    max_parked: int = _option(10_000, count, "a whole number from 1")
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

    def of_call(self, values: Mapping[str, object], *, is_sent: bool = False) -> LockOptions:
        """A copy with the options that a single call sets.

        Args:
            values: the call's values, by option name.
            is_sent: the call has come, and may be from before a deploy. What contradicts the task
                gives way, and what is never used does no harm.

        Raises:
            LockConfigError: an option is unknown, cannot be set by a call or has an invalid value,
                or, where the call is made, two options contradict each other.
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
                    f"{where}: lock_{name} belongs to the task, and no message carries it. "
                    f"Declare it there. A single call can have {can}."
                )
        new = {n: _checked(n, value, f"lock_{n}", where) for n, value in values.items()}
        if is_sent:
            return self._with_what_fits(new)
        options = replace(self, **new)
        options._check_together(where, {f"lock_{name}": value for name, value in new.items()})
        return options

    def _with_what_fits(self, values: Mapping[str, Any]) -> LockOptions:
        options = self
        for name, value in values.items():
            changed = replace(options, **{name: value})
            if not any(changed._contradictions({})):
                options = changed
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
                "lock_hold='workflow' keeps the lock for the next step. A lock that a workflow "
                "holds has no cooldown, whichever step declares one. Use one of them."
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
            off = getattr(self, needed) == _DECLARED[needed].default
            unused = off and value != _DECLARED[name].default
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
    def parts(self) -> list[Any]:
        """What makes the lock names: the templates and callables of lock_key."""
        return list(self.key) if isinstance(self.key, list | tuple) else [self.key]

    def _contradictions_of_parts(self) -> Iterator[str]:
        parts = self.parts
        for option, what in (("limit", "number"), ("mode", "word")):
            value = getattr(self, option)
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
                len(self.parts) > 1
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
        limits = self.limit
        if isinstance(limits, Mapping):
            limits = [limits.get(part, 1) for part in self.parts]
        assert isinstance(limits, list), "see Declaration.limits"
        return min(limits[number] for number in numbers)

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
        mode = self._for_call("mode", arguments, _word(*MODES), "'exclusive' or 'shared'")
        limit: int = self._for_call("limit", arguments, count, "a whole number from 1")
        return SHARED if mode == "shared" else limit

    def _for_call(
        self, option: str, arguments: Mapping[str, object], check: Check, allowed: str
    ) -> Any:
        """An option for a call: what the callable in it returns, if there is one."""
        value = getattr(self, option)
        if not callable(value):
            return value
        where = f"task {self.task}: the callable in lock_{option}"
        made = called(where, by_name(value, where), arguments)
        try:
            return check(made)
        except ValueError:
            raise LockConfigError(
                f"{where} must return {allowed}; it returned {made!r:.100}"
            ) from None


_DECLARED = {each.name: each for each in fields(LockOptions) if each.metadata}
# Options that are used only beside another one, and how that one can look. Not on_duplicate: it is
# also for a single call that asks for lock_dedup.
_NEEDS = {
    "debounce_max": ("debounce", "5"),
    "debounce_reduce": ("debounce", "5"),
    "order_gap": ("order", "'sent'"),
    "order_retry": ("order", "'sent'"),
    "on_gap": ("hold", "'workflow'"),
}
OPTION_NAMES = tuple(_DECLARED)
#: The options that a single call can set: `apply_async(…, lock_max_wait=5)`. On the others
#: all calls of a lock name must agree.
CALL_OPTIONS = (
    *("on_conflict", "max_wait", "ttl", "dedup", "on_duplicate", "max_parked"),
    *("keep_on_retry", "on_lost", "on_unavailable", "cooldown"),
    *("debounce", "debounce_max"),
)


# What redis-py's `Lock`, celery-singleton and habit call an option.
_ELSEWHERE = {"timeout": "ttl", "expiry": "ttl", "expires": "ttl", "blocking_timeout": "max_wait"}
_ELSEWHERE |= {"name": "key", "redis_url": "url"}


def unknown(written: str, prefix: str, others: tuple[str, ...] = ()) -> str:
    """The sentence about an unknown option, with the most similar name, or all names."""
    from difflib import get_close_matches

    names = (*others, *OPTION_NAMES)
    rest = written.removeprefix(prefix)
    plain = rest.lower().removeprefix("lock_")
    close = get_close_matches(_ELSEWHERE.get(plain, plain), names, n=1)
    spelt = [prefix + (name.upper() if rest.isupper() else name) for name in close or names]
    hint = f"Did you mean {spelt[0]}?" if close else f"There are: {', '.join(spelt)}."
    return f"there is no option {written}. {hint}"


def _checked(name: str, value: Any, written: str, where: str) -> Any:
    declared = _DECLARED[name].metadata
    try:
        return declared["check"](value)
    except ValueError:
        raise LockConfigError(
            f"{where}: {written}={value!r:.100} cannot be used. It takes {declared['allowed']}."
        ) from None
