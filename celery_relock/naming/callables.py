"""A user's callable in an option: it gets those of a call's arguments that it names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import takewhile
from typing import Any

from celery.exceptions import TaskPredicate

from ..engine.interrupt import is_thrown_in
from ..errors import LockConfigError
from .template import suggestion

_HOW_TO_GET_SELF = (
    " A staticmethod gets the arguments of the call alone: take 'self' away from it, or make it a "
    "method by taking the staticmethod away; then 'self' is the task."
)

if sys.version_info >= (3, 14):
    from annotationlib import Format

    def read_signature(function: Callable[..., Any]) -> inspect.Signature:
        """`inspect.signature`. An annotation can have a name that is only there for a type checker
        (PEP 649): Celery takes such a task, and we look at no annotation."""
        return inspect.signature(function, annotation_format=Format.STRING)
else:
    read_signature = inspect.signature


def called(where: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a user's function returns.

    Args:
        where: what it is, for the error.

    Raises:
        LockConfigError: it failed. What is no error of its own passes: it arrived from outside, as
            a time limit's does, or says how the task ends (`Ignore`, `Reject`, `Retry`).
    """
    try:
        return function(*args)
    except Exception as error:
        if isinstance(error, TaskPredicate) or is_thrown_in(error):
            raise
        raise LockConfigError(f"{where} raised {error!r}{_hint(error)}") from error


def _hint(error: Exception) -> str:
    if isinstance(error, AttributeError) and isinstance(getattr(error, "obj", None), Mapping):
        return ". A model arrives as the mapping that a worker receives: read its items."
    return ""


def by_name(
    function: Callable[..., Any], where: str, known: Collection[str] | None = None
) -> Callable[[Mapping[str, object]], Any]:
    """What calls a user's function with those of a call's arguments that it names.

    Args:
        function: the user's.
        where: what it is, for errors.
        known: the parameters of the task; None if it takes anything.

    Raises:
        LockConfigError: it would fail at each call: it wants what the task does not take. Or it
            does not tell what it wants.
    """
    positional: list[str] = []
    by_keyword: list[str] = []
    takes_all, takes_any = False, ""
    try:
        parameters = read_signature(function).parameters
    except (TypeError, ValueError) as error:
        raise LockConfigError(
            f"{where} does not tell which arguments it takes: {error}. Wrap it in a function that "
            "names them."
        ) from error
    for name, parameter in parameters.items():
        kind = parameter.kind
        if kind == parameter.VAR_KEYWORD:
            takes_all = True
        elif kind == parameter.VAR_POSITIONAL:
            takes_any = name
        else:
            (positional if kind == parameter.POSITIONAL_ONLY else by_keyword).append(name)
            if known is not None and name not in known and parameter.default is parameter.empty:
                hint = suggestion(name, known)
                raise LockConfigError(
                    f"{where} wants {name!r}, which the task does not take."
                    + (_HOW_TO_GET_SELF if name in ("self", "cls") else hint)
                )
    if takes_any and not (takes_all or positional or by_keyword):
        raise LockConfigError(
            f"{where} has *{takes_any} alone, which would always be empty: it gets the task's "
            "arguments by their names. Name those that it needs, or take **kwargs for all of them."
        )
    # What a partial has fixed by keyword looks like a default, and is meant to stay.
    fixed = function.keywords if isinstance(function, partial) else ()
    skipped = {*fixed, *positional}

    def call(arguments: Mapping[str, object]) -> Any:
        first = [arguments[name] for name in takewhile(arguments.__contains__, positional)]
        wanted = arguments if takes_all else by_keyword
        keywords = {n: arguments[n] for n in wanted if n in arguments and n not in skipped}
        return function(*first, **keywords)

    return call
