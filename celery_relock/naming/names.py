"""From the option `lock_key` and the arguments of a call to the names of the locks it takes."""

from __future__ import annotations

import inspect
import unicodedata
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from typing import Any, Literal, NamedTuple, TypeAlias

from ..errors import LockConfigError
from . import canonical
from .template import Template, suggestion

MAX_NAME_BYTES = 4096

KeyPart: TypeAlias = str | Callable[..., object]
LockKey: TypeAlias = KeyPart | list[KeyPart] | tuple[KeyPart, ...] | Literal[False] | None

_Arguments: TypeAlias = Mapping[str, object]
_Maker: TypeAlias = Callable[[_Arguments], str | tuple[str, ...]]

_ABSENT = object()
_UNPRINTABLE = {
    "Cc": "a control character",
    "Cs": "half of a surrogate pair",
    "Zl": "a line separator",
    "Zp": "a paragraph separator",
}


class NameRule(NamedTuple):
    """How the lock names of a task follow from the arguments of a call.

    Attributes:
        task: the task's name.
        makers: one for each part of lock_key.
        off: whether the task takes no lock at all.
    """

    task: str
    makers: tuple[_Maker, ...]
    off: bool = False

    @classmethod
    def compile(
        cls, key: LockKey, task_name: str, signature: inspect.Signature, task: Any = None
    ) -> NameRule:
        """Check a lock_key against the signature of its task and make the rule.

        Args:
            key: the option as declared. Of a callable, what stands in the class dict (function,
                staticmethod, partial …): attribute access would have made a bound method of it.
            task_name: for the default name and for messages.
            signature: of the task's `run`, without `self`.
            task: what `{self.…}` reads.

        Raises:
            LockConfigError: the key names unknown arguments or can never give a name.
        """
        if key is False:
            return cls(task_name, (), off=True)
        if key is None:
            return cls(task_name, (_default(task_name),))
        parts = key if isinstance(key, (list, tuple)) else (key,)
        if not parts:
            raise LockConfigError(
                f"task {task_name}: lock_key is empty. For a task without a lock it is False."
            )
        against = _Task(task_name, signature, task)
        return cls(task_name, tuple(against.maker(part) for part in parts))

    def names(self, arguments: _Arguments, prefix: str = "") -> tuple[str, ...]:
        """The lock names for these bound arguments: sorted, each once, none without a lock.

        Raises:
            LockConfigError: these arguments give no name, or one that no lock can have.
        """
        return tuple(self.parts(arguments, prefix))

    def parts(self, arguments: _Arguments, prefix: str = "") -> dict[str, tuple[int, ...]]:
        """The lock names, and by which parts of lock_key (their numbers) each was given. Raises as
        `names`."""
        where = f"task {self.task}"
        made: dict[str, tuple[int, ...]] = {}
        for number, maker in enumerate(self.makers):
            found = maker(arguments)
            for name in (found,) if isinstance(found, str) else found:
                made[prefix + name] = (*made.get(prefix + name, ()), number)
        for name in made:
            check_name(name, where)
        return {name: made[name] for name in sorted(made)}


def check_name(name: str, where: str) -> str:
    """Return the name if a lock can have it.

    Args:
        name: any length up to 4096 bytes of UTF-8; a longer one is data that went astray.
        where: whose name it is, for the message.

    Raises:
        LockConfigError: it is empty, blank or too long, or holds characters that no log line shows.
    """
    if not name or name.isspace():
        raise LockConfigError(f"{where}: the lock name {name!r} is empty.", name=name)
    if not name.isprintable():
        for character in name:
            if problem := _UNPRINTABLE.get(unicodedata.category(character)):
                raise LockConfigError(
                    f"{where}: the lock name {name!r:.200} holds {problem}, {character!a}. "
                    "Build it from ids or other plain text.",
                    name=name,
                )
    size = len(name.encode("utf-8"))
    if size > MAX_NAME_BYTES:
        raise LockConfigError(
            f"{where}: the lock name {name!r:.80} has {size} bytes, the most is {MAX_NAME_BYTES}. "
            "Name the resource by its id, not by its content.",
            name=name,
        )
    return name


def _default(task: str) -> _Maker:
    def maker(arguments: _Arguments) -> tuple[str, ...]:
        return (f"{task}:{canonical.digest(arguments, task)}",)

    return maker


class _Task:
    """What the parts of a lock_key are held against."""

    def __init__(self, name: str, signature: inspect.Signature, task: Any = None) -> None:
        self.where = f"task {name}"
        self.name = name
        self.parameters = tuple(signature.parameters)
        #: What a template can read beside the arguments, which go before it.
        self.given: dict[str, Any] = {"task": name}
        if task is not None:
            self.given["self"] = task
        self.unnamed = {p.name for p in signature.parameters.values() if p.default is None}
        self.rest = next(
            (p.name for p in signature.parameters.values() if p.kind == p.VAR_KEYWORD), None
        )

    def maker(self, part: Any) -> _Maker:
        if isinstance(part, str):
            return self._from_template(part)
        function = part.__func__ if isinstance(part, staticmethod) else part
        if callable(function):
            return self._from_callable(function)
        raise LockConfigError(
            f"{self.where}: lock_key {part!r:.80} is of type {type(part).__qualname__}. It is a "
            'template such as "account:{account_id}", a callable, a list of these, None or False.'
        )

    def _from_template(self, source: str) -> _Maker:
        try:
            template = Template(source)
        except LockConfigError as error:
            raise LockConfigError(f"{self.where}: {error}") from error
        if self.rest is None:
            beside = [name for name in self.given if name in template.names]
            template.check((*self.parameters, *beside), self.name)
        if not template.names:
            check_name(source, self.where)
        if missing := [name for name in template.names if name in self.unnamed]:
            raise LockConfigError(
                f"{self.where}: lock_key {source!r} reads {missing[0]!r}, whose default is None: "
                "all calls without a value would share one lock, and are refused. Give the "
                f"argument another default, or write lock_key=lambda {missing[0]}: …"
            )
        for literal in filter(str.strip, template.literals):
            check_name(literal, self.where)

        given = {name: value for name, value in self.given.items() if name in template.names}
        if not given:
            return self.seeing(partial(template.render, task=self.name))

        def maker(arguments: _Arguments) -> str:
            return template.render({**given, **arguments}, task=self.name)

        return self.seeing(maker)

    def _from_callable(self, function: Callable[..., object]) -> _Maker:
        return self.seeing(_Call(function, self))

    def seeing(self, maker: _Maker) -> _Maker:
        """A maker that gets what the task's `**parameter` caught, by its own name too."""
        if self.rest is None:
            return maker

        def seen(arguments: _Arguments) -> str | tuple[str, ...]:
            rest = arguments.get(self.rest or "")
            both = {**rest, **arguments} if isinstance(rest, Mapping) and rest else arguments
            return maker(both)

        return seen


class _Call:
    """A lock_key callable, and which of the task's arguments it gets."""

    def __init__(self, function: Callable[..., object], task: _Task) -> None:
        self.function = function
        self.where = f"{task.where}: lock_key {getattr(function, '__qualname__', repr(function))}"
        # What a partial has fixed by keyword looks like a default, and is meant to stay.
        self.fixed = frozenset(function.keywords if isinstance(function, partial) else ())
        self.positional: list[str] = []
        self.by_keyword: list[str] = []
        self.takes_all = False
        for parameter in self._parameters():
            self._plan(parameter, task)

    def __call__(self, arguments: _Arguments) -> tuple[str, ...]:
        positional = list(
            takewhile(
                lambda value: value is not _ABSENT,
                (arguments.get(name, _ABSENT) for name in self.positional),
            )
        )
        wanted = arguments if self.takes_all else self.by_keyword
        skipped = self.fixed.union(self.positional)
        keywords = {n: arguments[n] for n in wanted if n in arguments and n not in skipped}
        try:
            made = self.function(*positional, **keywords)
        except Exception as error:
            raise LockConfigError(f"{self.where} raised {error!r}{_hint(error)}") from error
        return self._checked(made)

    def _parameters(self) -> list[inspect.Parameter]:
        if inspect.iscoroutinefunction(self.function):
            raise LockConfigError(f"{self.where} is a coroutine function; it must return a name.")
        try:
            return list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError) as error:
            raise LockConfigError(
                f"{self.where} does not tell which arguments it takes: {error}. "
                "Wrap it in a function that names them."
            ) from error

    def _plan(self, parameter: inspect.Parameter, task: _Task) -> None:
        name, kind = parameter.name, parameter.kind
        if kind == parameter.VAR_POSITIONAL:
            return
        if kind == parameter.VAR_KEYWORD:
            self.takes_all = True
            return
        (self.positional if kind == parameter.POSITIONAL_ONLY else self.by_keyword).append(name)
        known = task.rest is not None or name in task.parameters
        if not known and parameter.default is parameter.empty:
            hint = suggestion(name, task.parameters)
            raise LockConfigError(
                f"{self.where} wants {name!r}, which the task does not take."
                + (_HOW_TO_GET_SELF if name in ("self", "cls") else hint)
            )

    def _checked(self, made: object) -> tuple[str, ...]:
        names = made if isinstance(made, (list, tuple)) else (made,)
        if names and all(isinstance(name, str) for name in names):
            return tuple(str.__str__(name) for name in names)
        raise LockConfigError(
            f"{self.where} returned {made!r:.80} ({type(made).__qualname__}). "
            "It must return a lock name, or a list of at least one."
        )


_HOW_TO_GET_SELF = (
    " A staticmethod gets the arguments of the call alone: take 'self' away from it, or make it a "
    "method by taking the staticmethod away; then 'self' is the task."
)


def _hint(error: Exception) -> str:
    if isinstance(error, AttributeError) and isinstance(getattr(error, "obj", None), Mapping):
        return ". A model reaches lock_key as the mapping that a worker receives: read its items."
    return ""
