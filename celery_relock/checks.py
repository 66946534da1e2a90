"""Checks of option values: each gives back what the library uses, or raises ValueError."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

Check: TypeAlias = Callable[[Any], Any]


def either(*checks: Check) -> Check:
    """The first check that takes the value."""

    def check(value: Any) -> Any:
        for each in checks:
            try:
                return each(value)
            except ValueError:
                continue
        raise ValueError(value)

    return check


def word(*words: str) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(value)
        return value

    return check


def none(value: Any) -> None:
    if value is not None:
        raise ValueError(value)


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def function(value: Any) -> Any:
    if not callable(value):
        raise ValueError(value)
    return value


def count(value: Any) -> int:
    """A whole number from 1. True is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(value)
    return value


def seconds(least: float, *, above: bool = False) -> Check:
    """A number of seconds, or a timedelta, from `least`, or above it."""

    def check(value: Any) -> float:
        number = value.total_seconds() if isinstance(value, timedelta) else value
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(value)
        if not math.isfinite(number) or number < least or (above and number == least):
            raise ValueError(value)
        return float(number)

    return check


def key(value: Any) -> Any:
    """Only the type: whether a lock_key fits the task is `NameRule.compile`'s to say."""
    parts = value if isinstance(value, list | tuple) else (value,)
    if value is None or value is False or all(map(_makes_names, parts)):
        return value
    raise ValueError(value)


def _makes_names(part: Any) -> bool:
    return isinstance(part, str | staticmethod) or callable(part)
