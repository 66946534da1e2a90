"""From the call of a task to the names of its locks.

bind      the arguments of a call by name, the same for every way to call it
NameRule  from `lock_key` and these arguments to lock names
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from celery.local import Proxy

from ..errors import LockConfigError
from . import canonical
from .callables import by_name, called, read_signature
from .template import Template, check_name

KeyPart: TypeAlias = str | Callable[..., object]
LockKey: TypeAlias = KeyPart | list[KeyPart] | tuple[KeyPart, ...] | Literal[False] | None

_Arguments: TypeAlias = Mapping[str, object]
_Maker: TypeAlias = Callable[[_Arguments], str | tuple[str, ...]]

_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


def signature_of(task: Any) -> inspect.Signature:
    """The signature of a task's body, without `self`.

    Read from `run`, not from Celery's `__header__`: class-based tasks have none, and under
    `pydantic=True` it takes anything. A body that does not tell its signature takes anything too.
    """
    if issubclass(type(task), Proxy):  # what the decorator returns; it takes no weak reference
        task = task._get_current_object()
    signature = _signatures.get(task)
    if signature is None:
        try:
            signature = read_signature(task.run)
        except ValueError:
            signature = read_signature(_anything)
        parameters = [*map(_as_declared, signature.parameters.values())]
        _signatures[task] = signature = signature.replace(parameters=parameters)
    return signature


def _as_declared(parameter: inspect.Parameter) -> inspect.Parameter:
    """With a default of its own: a body may fill a list or dict that is a default, and equal calls
    have one name all the same."""
    if isinstance(parameter.default, list | dict | set | bytearray):
        with suppress(Exception):  # of what it contains: then it gives no name by itself either
            return parameter.replace(default=deepcopy(parameter.default))
    return parameter


class Misfit(TypeError):
    """A call does not fit the signature of its task."""


def bind(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, object]:
    """The arguments of a call by parameter name, with defaults applied and without `self`.

    Positional, keyword and defaulted calls give the same dict. A pydantic model among them is the
    dict that a worker would receive, unless the task's serializer is pickle.

    Raises:
        Misfit: the call does not fit the task's signature.
    """
    serializer = getattr(task, "serializer", None)
    args, kwargs = dumped(task, args, kwargs, serializer)
    signature = signature_of(task)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise Misfit(
            f"{task.name}{signature} cannot be called with these arguments: {error}. Its lock name "
            "follows from this signature; a decorator that takes other arguments has to set "
            "__signature__ to them."
        ) from None
    bound.apply_defaults()
    arguments = bound.arguments
    if serializer != "pickle":
        for name, value in arguments.items():
            if hasattr(type(value), "model_dump") and not hasattr(value, "__json__"):
                arguments[name] = value.model_dump(mode="json")
    return arguments


def dumped(
    task: Any, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call as Celery gives them to the serializer.

    A pydantic model becomes its dict, unless the serializer is pickle.
    """
    dump = getattr(task, "_dump_pydantic_arguments", None)  # Celery >= 5.7, knows by_alias and such
    if dump is None or serializer == "pickle":
        return args, kwargs
    args, kwargs = dump(args, kwargs)
    return args, kwargs


def _anything(*args: Any, **kwargs: Any) -> None:
    """Takes every call."""


class NameRule(NamedTuple):
    """How the lock names of a task follow from the arguments of a call.

    Attributes:
        task: the task's name.
        makers: one for each part of lock_key.
        off: whether the task has no lock at all.
        rest: the name of the task's `**parameter`, if it has one.
    """

    task: str
    makers: tuple[_Maker, ...]
    off: bool = False
    rest: str | None = None

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
        against = _Task(task_name, signature, task)
        if key is None:

            def of_all(arguments: _Arguments) -> str:
                return f"{task_name}:{canonical.digest(arguments, task_name)}"

            return cls(task_name, (of_all,), rest=against.rest)
        parts = key if isinstance(key, (list, tuple)) else (key,)
        if not parts:
            raise LockConfigError(
                f"task {task_name}: lock_key is empty. For a task without a lock it is False."
            )
        return cls(task_name, tuple(map(against.maker, parts)), rest=against.rest)

    def names(self, arguments: _Arguments, prefix: str = "") -> tuple[str, ...]:
        """The lock names for these bound arguments: sorted, each once, none without a lock.

        Raises:
            LockConfigError: these arguments give no name, or one that no lock can have.
        """
        return tuple(sorted(self.parts(arguments, prefix)))

    def parts(self, arguments: _Arguments, prefix: str = "") -> dict[str, tuple[int, ...]]:
        """The lock names, and by which parts of lock_key (their numbers) each was given. Raises as
        `names`."""
        made: dict[str, tuple[int, ...]] = {}
        for number, maker in enumerate(self.makers):
            found = maker(arguments)
            for each in (found,) if isinstance(found, str) else found:
                # By itself: calls without a name would all share the prefix.
                whole = prefix + each if each.strip() else each
                name = check_name(whole, f"task {self.task}")
                made[name] = (*made.get(name, ()), number)
        return made


class _Task:
    """What the parts of a lock_key are checked against."""

    def __init__(self, name: str, signature: inspect.Signature, task: Any) -> None:
        self.where = f"task {name}"
        self.name = name
        parameters = signature.parameters.values()
        self.rest = next((p.name for p in parameters if p.kind == p.VAR_KEYWORD), None)
        #: Its parameters; None if it takes anything.
        self.known = None if self.rest else tuple(signature.parameters)
        #: What a template can read beside the arguments, which go before it.
        self.given: dict[str, Any] = {"task": name}
        if task is not None:
            self.given["self"] = task
        self.unnamed = {p.name for p in parameters if p.default is None}

    def maker(self, part: Any) -> _Maker:
        made = self._of_template(part) if isinstance(part, str) else self._of_callable(part)
        if (name := self.rest) is None:
            return made
        return lambda arguments: made(seen(arguments, name))

    def _of_template(self, source: str) -> _Maker:
        template = Template(source, self.name)
        given = {name: value for name, value in self.given.items() if name in template.names}
        if self.known is not None:
            template.check((*self.known, *given))
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
        if not given:
            return template.render
        return lambda arguments: template.render({**given, **arguments})

    def _of_callable(self, part: Any) -> _Maker:
        function = part.__func__ if isinstance(part, staticmethod) else part
        if not callable(function):
            raise LockConfigError(
                f"{self.where}: lock_key {part!r:.80} is of type {type(part).__qualname__}. It is "
                'a template such as "account:{account_id}", a callable, a list of these, None or '
                "False."
            )
        written = function
        while isinstance(written, partial):  # a method of the task's class comes as one
            written = written.func
        where = f"{self.where}: lock_key {getattr(written, '__qualname__', repr(written))}"
        if inspect.iscoroutinefunction(function):
            raise LockConfigError(f"{where} is a coroutine function; it must return a name.")
        call = by_name(function, where, self.known)

        def maker(arguments: _Arguments) -> tuple[str, ...]:
            made = called(where, call, arguments)
            names = made if isinstance(made, (list, tuple)) else (made,)
            if names and all(isinstance(name, str) for name in names):
                return tuple(str.__str__(name) for name in names)
            raise LockConfigError(
                f"{where} returned {made!r:.80} ({type(made).__qualname__}). "
                "It must return a lock name, or a list of at least one."
            )

        return maker


def seen(arguments: _Arguments, rest: str | None) -> _Arguments:
    """The arguments, and what the task's `**rest` caught, by its own name too."""
    caught = arguments.get(rest) if rest is not None else None
    return {**caught, **arguments} if isinstance(caught, Mapping) and caught else arguments
