"""One text for each value, the same before a message is sent and after it has arrived.

A locked task computes its lock name in the worker, from arguments that went through a serializer,
and, when it is called inline, from the arguments as they are. So whatever kombu's JSON makes equal
has one text here: tuples and lists, mapping keys and their JSON spelling, an enum that is a str and
its value, a zone and its offset. What JSON keeps apart (`1`, `"1"`, `True`, `1.0`) stays apart.
Values that only other serializers carry (sets, plain enums, dataclasses) have a text of their own.
"""

from __future__ import annotations

import dataclasses
import io
import re
import types
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from json.encoder import encode_basestring_ascii as quote
from typing import Any
from uuid import UUID

from ..engine import ids
from ..engine.interrupt import is_thrown_in
from ..errors import LockConfigError

MAX_DEPTH = 100

# An address names an object of one process: the worker's copy of the argument has another.
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_NEVER_STABLE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    io.IOBase,
)
# Where Django's rows and queries are from: the text of a row is what its author likes to read, and
# that of a query is made of the rows that it finds.
_ROWS = {"django.db.models.base", "django.db.models.query"}
_ZONED = (datetime, time)


class Unstable(Exception):
    """A value has no stable form. `path` leads to it, in the notation of a lock_key template."""

    def __init__(self, value: object, reason: str) -> None:
        super().__init__(f"({type(value).__qualname__}) {reason}")
        self.path = ""


def digest(arguments: Mapping[str, object], task: str) -> str:
    """22 characters that stand for the bound arguments of a call.

    Raises:
        LockConfigError: an argument has no stable form; names the task, the argument and the path.
    """
    parts = []
    for name in sorted(arguments):
        try:
            parts.append(f"{quote(name)}:{text(arguments[name])}")
        except Unstable as problem:
            raise LockConfigError(
                f"task {task}: the lock name is made of all arguments, and {name}{problem.path} "
                f"{problem}. Give lock_key a template over the arguments that count, "
                'such as lock_key="account:{account_id}", or a callable.'
            ) from problem
    return ids.digest(",".join(parts).encode("ascii"))


def text(value: object, above: tuple[int, ...] = ()) -> str:
    """The canonical text of a value: ASCII, and unambiguous.

    `above` has the ids of the objects around it, to notice a cycle. Raises Unstable.
    """
    scalar = _SCALARS.get(type(value))
    if scalar is not None:
        return scalar(value)
    if id(value) in above:
        raise Unstable(value, "contains itself")
    if len(above) >= MAX_DEPTH:
        raise Unstable(value, f"is nested deeper than {MAX_DEPTH} levels")
    inside = (*above, id(value))
    plain = settle(value)
    if isinstance(plain, (list, tuple, deque)):
        return f"[{','.join(_items(plain, inside))}]"
    if isinstance(plain, (set, frozenset)):
        return f"set[{','.join(sorted(_items(plain, inside)))}]"
    if isinstance(plain, Mapping):
        return _mapping(plain, inside)
    scalar = _SCALARS.get(type(plain))
    return scalar(plain) if scalar is not None else f"repr({quote(described(plain))})"


def settle(value: object) -> object:
    """The value as a worker would see it, one level deep; an unknown object comes back as it is.

    Raises:
        Unstable: code of the value's own class failed, or gave no end of new forms.
    """
    for _ in range(MAX_DEPTH):
        if type(value) in _SCALARS and type(value) not in _ZONED:
            return value
        try:
            plain = _plainer(value)
        except Exception as error:
            if is_thrown_in(error):
                raise
            raise Unstable(value, f"cannot be made plain: {error!r}") from error
        if plain is value or type(plain) in _ZONED:
            return plain
        value = plain
    raise Unstable(value, "has a plain form that is never plain")


def described(value: object, show: Callable[[object], str] = repr) -> str:
    """What an object of an unknown type says of itself, if that is the same in every process.

    Raises:
        Unstable: it says nothing but its address, or stands for something of this process alone.
    """
    kind = type(value)
    # By `__class__`: a lazy object (`request.user`) has that of its row.
    if any(each.__module__ in _ROWS for each in value.__class__.__mro__):
        raise Unstable(value, "is a row or a query, whose text can change. Name a key: {order.pk}")
    if hasattr(kind, "__array__") and hasattr(kind, "__len__"):
        raise Unstable(value, "is an array or a table, whose text can leave out most of it")
    silent = kind.__repr__ is object.__repr__ and (show is repr or kind.__str__ is object.__str__)
    passing = isinstance(value, _NEVER_STABLE) or hasattr(kind, "__next__")
    if silent or passing or hasattr(kind, "fileno"):
        raise Unstable(value, "has no form that is the same in every process")
    try:
        shown = show(value)
    except Exception as error:
        if is_thrown_in(error):
            raise
        raise Unstable(value, f"cannot be shown: {error!r}") from error
    if _ADDRESS.search(shown) or str(id(value)) in shown:
        raise Unstable(value, f"shows a memory address: {shown:.80}")
    return shown


def key_text(key: object, above: tuple[int, ...] = ()) -> str:
    """The text of a mapping key: JSON has no keys but strings, and this is how it spells them."""
    if isinstance(key, str):
        return quote(key)
    if key is None or isinstance(key, bool):
        return {None: '"null"', True: '"true"', False: '"false"'}[key]
    if isinstance(key, int):
        return f'"{int.__repr__(key)}"'
    if isinstance(key, float):
        spelt = float.__repr__(key)
        return quote({"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(spelt, spelt))
    plain = settle(key)
    return text(key, above) if plain is key else key_text(plain, above)


def _items(values: Any, inside: tuple[int, ...]) -> list[str]:
    found = []
    try:
        for value in values:
            found.append(text(value, inside))
    except Unstable as problem:
        problem.path = f"[{len(found)}]{problem.path}"
        raise
    return found


def _mapping(values: Mapping[Any, object], inside: tuple[int, ...]) -> str:
    found: dict[str, str] = {}
    for key, value in values.items():
        try:
            # If JSON spells two keys alike, a reader keeps the last, and so does this.
            found[key_text(key, inside)] = text(value, inside)
        except Unstable as problem:
            step = f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!s:.40}]"
            problem.path = f"{step}{problem.path}"
            raise
    return f"{{{','.join(f'{key}:{found[key]}' for key in sorted(found))}}}"


def _plainer(value: Any) -> Any:
    """One step towards a plain form, in the order in which kombu's encoder looks."""
    for base, form in _NATIVE.items():
        if isinstance(value, base):
            return form(value)
    if isinstance(value, (list, tuple, dict, type)):
        return value
    if (reducer := getattr(value, "__json__", None)) is not None:
        return reducer()
    for base, form in _MARKED.items():
        if isinstance(value, base):
            return form(value)
    from kombu.utils.json import JSONEncoder  # a `Lock` outside of tasks loads no kombu

    with suppress(TypeError):  # what an application registered there, and lazy texts of Django
        return JSONEncoder().default(value)
    if isinstance(value, Enum):
        return value.value
    if callable(getattr(type(value), "model_dump", None)):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def _integer(value: int) -> str:
    try:
        return int.__repr__(value)
    except ValueError:  # longer than sys.get_int_max_str_digits()
        return hex(value)


# The forms are asked of the base class: a subclass may print itself differently, and after the
# round trip it is the base class that prints.
_SCALARS: dict[type, Callable[[Any], str]] = {
    str: quote,
    int: _integer,
    bool: lambda value: "true" if value else "false",
    type(None): lambda value: "null",
    float: lambda value: float.__repr__(value + 0.0),  # minus zero equals zero
    datetime: lambda value: f"datetime({value.isoformat()})",
    date: lambda value: f"date({value.isoformat()})",
    time: lambda value: f"time({value.isoformat()})",
    Decimal: lambda value: f"decimal({value})",
    UUID: lambda value: f"uuid({value.hex})",
    bytes: lambda value: f"bytes({value.hex()})",
}
_NATIVE: dict[type, Callable[[Any], object]] = {
    str: str.__str__,
    int: int.__pos__,
    float: float.__pos__,
}
_MARKED: dict[type, Callable[[Any], object]] = {
    # Through its text: a zone arrives as a fixed offset, and `fold` does not arrive at all.
    datetime: lambda value: datetime.fromisoformat(datetime.isoformat(value)),
    date: lambda value: date.fromisoformat(date.isoformat(value)),
    time: lambda value: time.fromisoformat(time.isoformat(value)),
    Decimal: lambda value: Decimal(Decimal.__str__(value)),
    UUID: lambda value: UUID(int=value.int),
    bytes: bytes,
    bytearray: bytes,
    memoryview: bytes,
}
