"""From the call of a task to its arguments by name, the same for every way to call it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from celery.local import Proxy
from kombu.utils.json import JSONEncoder

from .canonical import register_plain

# Types that an application registered with kombu, and lazy texts of Django: as they are sent.
register_plain(JSONEncoder().default)

# Autoretry, pydantic=True and the lock itself pass arguments on as they are.
_PASS_ON = ("celery.", "celery_relock.")

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
            signature = inspect.signature(task.run)
        except ValueError:
            signature = inspect.signature(_anything)
        _signatures[task] = signature
    return signature


def bind(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, object] | None:
    """The arguments of a call by parameter name, with defaults applied and without `self`.

    Positional, keyword and defaulted calls give the same dict. A pydantic model among them is the
    dict that a worker would receive, unless the task's serializer is pickle.

    None means that the call does not fit the body, which raises its own TypeError when it is
    called, before a line of it runs.

    Raises:
        TypeError: the call does not fit the signature that a decorator shows for the body, yet the
            decorator may accept it: the body could run, and no lock name is known for it.
    """
    serializer = getattr(task, "serializer", None)
    args, kwargs = dumped(task, args, kwargs, serializer)
    signature = signature_of(task)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        if _is_told_exactly(task.run):
            return None
        raise TypeError(
            f"{task.name}{signature}: {error}. Its lock name follows from this signature; "
            "a decorator that takes other arguments has to set __signature__ to them."
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
    """The arguments of a call as Celery gives them to the serializer: of a pydantic model its
    dict, unless it is pickle."""
    dump = getattr(task, "_dump_pydantic_arguments", None)  # Celery >= 5.7, knows by_alias and such
    if dump is None or serializer == "pickle":
        return args, kwargs
    args, kwargs = dump(args, kwargs)
    return args, kwargs


def _is_told_exactly(function: Any) -> bool:
    """Whether a call that does not fit the signature surely does not fit the function.

    Not so under a decorator with `functools.wraps`, which shows the arguments of the function that
    it wraps and may take others.
    """
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        code = getattr(function, "__func__", function)
        if not getattr(code, "__globals__", {}).get("__name__", "").startswith(_PASS_ON):
            return False
        function = wrapped
    return not hasattr(function, "__signature__")


def _anything(*args: Any, **kwargs: Any) -> None:
    """Takes every call."""
