"""The options of a locked task: each declared once, with its default, unit and allowed values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, TypeAlias

from .errors import LockConfigError

# How long a run may wait in its worker slot when lock_max_wait does not say, in seconds.
_PATIENCE = 60.0
#: What a run may do while somebody else holds the lock.
POLICIES = ("wait", "block", "retry", "drop", "raise")


# Checks of a value: each gives back what the library uses, or raises ValueError.
Check: TypeAlias = Callable[[Any], Any]


def _either(*checks: Check) -> Check:
    """The first check that takes the value."""

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


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _function(value: Any) -> Any:
    if not callable(value):
        raise ValueError(value)
    return value


def _count(value: Any) -> int:
    """A whole number from 1. True is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(value)
    return value


def _seconds(least: float, *, above: bool = False) -> Check:
    """A number of seconds, or a timedelta, from `least`, or above it."""

    def check(value: Any) -> float:
        number = value.total_seconds() if isinstance(value, timedelta) else value
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(value)
        if not math.isfinite(number) or number < least or (above and number == least):
            raise ValueError(value)
        return float(number)

    return check


def _key(value: Any) -> Any:
    """Only the type: whether a lock_key fits the task is `NameRule.compile`'s to say."""
    parts = value if isinstance(value, list | tuple) else (value,)
    if value is None or value is False or all(map(_makes_names, parts)):
        return value
    raise ValueError(value)


def _makes_names(part: Any) -> bool:
    return isinstance(part, str | staticmethod) or callable(part)


def _says(doc: str, allowed: str, check: Check) -> dict[str, Any]:
    return {"doc": doc, "allowed": allowed, "check": check}


def _words(doc: str, *words: str) -> dict[str, Any]:
    return _says(doc, ", ".join(map(repr, words)), _word(*words))


@dataclass(frozen=True, slots=True)
class LockOptions:
    """What a task declared with `lock_<option>`, or its app with `relock_<option>`.

    Times are in seconds. The fields say what each option means; `collect` makes one from what was
    declared and checks it.
    """

    key: Any = field(
        default=None,
        metadata=_says(
            "what the lock is named after; None: the task and all its arguments, False: no lock",
            'a template such as "account:{account_id}", a callable, a list of these, None, False',
            _key,
        ),
    )
    owner: Any = field(
        default="root",
        metadata=_says(
            "who may re-enter: the workflow, or this task alone",
            "'root', 'task', or a callable of the request",
            _either(_word("root", "task"), _function),
        ),
    )
    reentrant: str = field(
        default="inline",
        metadata=_words(
            "what enters again: tasks a holder spawned; calls on the same stack; the workflow",
            *("descendants", "inline", "workflow"),
        ),
    )
    limit: int | Callable[..., int] = field(
        default=1,
        metadata=_says(
            "entries at the same time",
            "a whole number from 1, or a callable of the arguments",
            _either(_count, _function),
        ),
    )
    ttl: float = field(
        default=30.0,
        metadata=_says(
            "lease: how long a hold lives without renewal, which comes every third of it",
            "seconds from 0.5, or a timedelta",
            _seconds(0.5),
        ),
    )
    on_conflict: Any = field(
        default="wait",
        metadata=_says(
            "what a run does while somebody else holds the lock",
            "'wait', 'block', 'retry', 'drop', 'raise', or a callable",
            _either(_word(*POLICIES), _function),
        ),
    )
    max_wait: float | None = field(
        default=None,
        metadata=_says(
            "how long a run may wait before LockConflict; None: no bound, in a worker slot 60 s",
            "None, seconds from 0, or a timedelta",
            _either(_none, _seconds(0)),
        ),
    )
    hold: str = field(
        default="task", metadata=_words("when the lock is given back", "task", "workflow")
    )
    gap_ttl: float = field(
        default=300.0,
        metadata=_says(
            "how long an entry lives while its next step, or a retry that is due, is on its way",
            "seconds above 0, or a timedelta",
            _seconds(0, above=True),
        ),
    )
    on_gap: str = field(
        default="tell", metadata=_words("an entry ended between two steps", "tell", "raise")
    )
    keep_on_retry: bool = field(
        default=False,
        metadata=_says("keep the hold through the countdown of retry()", "True or False", _flag),
    )
    max_parked: int = field(
        default=10_000, metadata=_says("parked runs per lock", "a whole number from 1", _count)
    )
    dedup: Any = field(
        default=None,
        metadata=_says(
            "how long a second call for the same lock gives the first one's result",
            "None, 'until_start', 'until_done', or seconds above 0",
            _either(_none, _word("until_start", "until_done"), _seconds(0, above=True)),
        ),
    )
    on_duplicate: str = field(
        default="existing",
        metadata=_words("what such a second call gives", "existing", "raise", "drop", "replace"),
    )
    on_lost: str = field(
        default="flag",
        metadata=_words("a hold ended before its run: tell; interrupt the body", "flag", "raise"),
    )
    on_unavailable: str = field(
        default="raise",
        metadata=_words(
            "Redis is away: fail, send the message again, run unprotected", "raise", "retry", "run"
        ),
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
            defaults: the app-wide defaults, by the names of the options.
            where: the task's name.

        Raises:
            LockConfigError: an unknown name, a value that an option does not take, or two options
                that contradict each other.
        """
        values: dict[str, Any] = {}
        for name, value in defaults.items():
            values[name] = _checked(name, value, f"relock_{name}", f"the app's settings ({where})")
        for attribute, value in declared.items():
            name = attribute.removeprefix("lock_")
            if name not in OPTION_NAMES:
                raise LockConfigError(f"task {where}: {unknown(attribute, 'lock_')}")
            values[name] = _checked(name, value, attribute, f"task {where}")
        options = cls(**values, task=where)
        if options.on_conflict == "raise" and declared.get("lock_max_wait") and options.max_wait:
            raise LockConfigError(
                f"task {where}: lock_max_wait={options.max_wait:g} is never used, because "
                "lock_on_conflict='raise' does not wait. To wait and then raise, use 'block'."
            )
        if options.key is False and declared.get("lock_dedup") is not None:
            raise LockConfigError(
                f"task {where}: lock_key=False gives lock_dedup={options.dedup!r} no name to tell "
                "duplicates by. Name it; lock_limit says how many may then run side by side."
            )
        return options

    @property
    def patience(self) -> float:
        """Seconds to wait in a worker slot (`"block"`, and every inline call). A message that is
        sent again takes no slot: without `max_wait` it has no bound."""
        return _PATIENCE if self.max_wait is None else self.max_wait

    def limit_for(self, arguments: Mapping[str, object]) -> int:
        """The limit for a call. A callable gets those of the bound arguments that it names.

        Raises:
            LockConfigError: the callable failed, or returned no whole number from 1.
        """
        if not callable(self.limit):
            return self.limit
        try:
            wanted = inspect.signature(self.limit).parameters.values()
            takes_all = any(each.kind is each.VAR_KEYWORD for each in wanted)
            names = arguments if takes_all else [p.name for p in wanted if p.name in arguments]
            return _count(self.limit(**{name: arguments[name] for name in names}))
        except Exception as error:
            raise LockConfigError(
                f"task {self.task}: the callable in lock_limit must return a whole number from 1, "
                f"for the arguments that it names: {error!r}"
            ) from error


_DECLARED = {each.name: each for each in fields(LockOptions) if each.metadata}
OPTION_NAMES = tuple(_DECLARED)


def unknown(written: str, prefix: str, others: tuple[str, ...] = ()) -> str:
    """What to say of a name that is no option: the one that was meant, or all there are."""
    names = (*others, *OPTION_NAMES)
    close = get_close_matches(written.removeprefix(prefix), names, n=1)
    every = ", ".join(prefix + name for name in names)
    hint = f"Did you mean {prefix}{close[0]}?" if close else f"There are: {every}."
    return f"there is no option {written}. {hint}"


def checked(name: str, value: object, where: str) -> Any:
    """An option's value for one call. Raises LockConfigError as `LockOptions.collect`."""
    return _checked(name, value, f"lock_{name}", where)


def _checked(name: str, value: Any, written: str, where: str) -> Any:
    declared = _DECLARED[name].metadata
    try:
        return declared["check"](value)
    except ValueError:
        raise LockConfigError(
            f"{where}: {written}={value!r:.100} cannot be used. It takes {declared['allowed']}."
        ) from None
