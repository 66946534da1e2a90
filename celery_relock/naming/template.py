"""What a lock can be called, and `"account:{account_id}"`: a lock name as a format string over the
arguments of a task.

The grammar is that of `str.format` with named fields alone: `{name}`, `{order.id}`, `{rows[0]}`,
`{totals[eur]}`, format specs and `!s`. A dot falls back to the item and brackets to the attribute,
because a model that the caller sees as an object reaches the worker as a mapping. Values are
rendered as they look in the worker and never parsed again.
"""

from __future__ import annotations

import re
import string
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, NamedTuple

from ..engine.interrupt import is_thrown_in
from ..errors import LockConfigError
from . import canonical

_FIELD = re.compile(r"(?P<name>[^.\[\]]*)(?P<path>(?:\.[^.\[\]]*|\[[^\]]*\])*)")
_STEP = re.compile(r"\.(?P<attribute>[^.\[\]]*)|\[(?P<item>[^\]]*)\]")
_FORMATTED = (str, int, float, Decimal, datetime, date, time)
_INDEXED = (list, tuple, deque, str)
_CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)
_MISSING = object()
MAX_NAME_BYTES = 4096
# The control characters, half of a surrogate pair, and Unicode's separators of lines.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")


class _Refused(Exception):
    """Why a field cannot be rendered; the caller knows which field of which task."""


class _Step(NamedTuple):
    key: str
    is_attribute: bool

    def __str__(self) -> str:
        return f".{self.key}" if self.is_attribute else f"[{self.key}]"


class _Field(NamedTuple):
    source: str
    name: str
    path: tuple[_Step, ...]
    as_text: bool
    spec: str


class Template:
    """A parsed lock name template.

    Args:
        source: the text.
        task: the task's name, for messages.

    Raises:
        LockConfigError: the text is no format string, or uses a part of the format language that
            could not give the same name in every process.
    """

    def __init__(self, source: str, task: str) -> None:
        self._where = f"task {task}: lock_key {source!r}"
        self._parts = tuple(_parse(source, self._where))

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments it reads, in their order."""
        return tuple(part.name for part in self._parts if isinstance(part, _Field))

    @property
    def literals(self) -> tuple[str, ...]:
        """The texts between the fields."""
        return tuple(part for part in self._parts if isinstance(part, str))

    def check(self, known: Collection[str]) -> None:
        """Raise LockConfigError if a field names none of the task's parameters."""
        for name in self.names:
            if name not in known:
                raise LockConfigError(
                    f"{self._where} names the argument {name!r}, which the task does not take."
                    + suggestion(name, known)
                )

    def render(self, arguments: Mapping[str, object]) -> str:
        """The lock name for these arguments.

        Raises:
            LockConfigError: a field is missing in the arguments, is None, or has no stable form.
        """
        text = ""
        for part in self._parts:
            if isinstance(part, str):
                text += part
                continue
            try:
                text += _rendered(part, arguments)
            except (_Refused, canonical.Unstable) as problem:
                inside = getattr(problem, "path", "")
                raise LockConfigError(
                    f"{self._where}: {{{part.source}}}{inside} {problem}"
                ) from None
        return text


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
    if not name.isprintable() and (found := _UNPRINTABLE.search(name)):
        raise LockConfigError(
            f"{where}: the lock name {name!r:.200} holds a control character or a line break, "
            f"{found[0]!a}. Build it from ids or other plain text.",
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


def suggestion(name: str, known: Collection[str]) -> str:
    """` Did you mean 'x'? It takes: …`, to end an error about an unknown argument."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return f"{meant} It takes: {', '.join(known) or 'no arguments'}."


def _parse(source: str, where: str) -> Iterator[str | _Field]:
    try:
        parsed = list(string.Formatter().parse(source))
    except ValueError as error:
        raise LockConfigError(
            f"{where} is not a format string: {error}. "
            "A brace that is meant as a brace is written twice."
        ) from error
    for literal, field, spec, conversion in parsed:
        if literal:
            yield literal
        if field is not None:
            yield _parse_field(f"{where}: {{{field}}}", field, spec or "", conversion)


def _parse_field(where: str, field: str, spec: str, conversion: str | None) -> _Field:
    match = _FIELD.fullmatch(field)
    if match is None:
        raise LockConfigError(f"{where} is not of the form {{name}}, {{name.x}} or {{name[x]}}.")
    name = match["name"]
    if not name.isidentifier():
        raise LockConfigError(f"{where} must name an argument of the task, as in {{account_id}}.")
    if conversion not in (None, "s"):
        raise LockConfigError(
            f"{where} has the conversion !{conversion}; only !s gives a form to lock on."
        )
    if "{" in spec:
        raise LockConfigError(f"{where} has a field inside its format spec, which is not allowed.")
    steps = tuple(_parse_step(where, step) for step in _STEP.finditer(match["path"]))
    return _Field(field, name, steps, conversion == "s", spec)


def _parse_step(where: str, match: re.Match[str]) -> _Step:
    if match["attribute"] is None:
        if not match["item"]:
            raise LockConfigError(f"{where} has empty brackets.")
        return _Step(match["item"], is_attribute=False)
    attribute = match["attribute"]
    if attribute.startswith("_"):
        raise LockConfigError(
            f"{where} reads the private attribute {attribute!r}. "
            f"For the key of a mapping write [{attribute}]."
        )
    if not attribute.isidentifier():
        raise LockConfigError(f"{where} reads {attribute!r}, which is not an attribute name.")
    return _Step(attribute, is_attribute=True)


def _rendered(field: _Field, arguments: Mapping[str, object]) -> str:
    value = arguments.get(field.name, _MISSING)
    if value is _MISSING:
        raise _Refused(f"is missing: this call has no argument {field.name!r}.")
    read = field.name
    for step in field.path:
        found = _follow(value, step)
        if found is _MISSING:
            raise _Refused(f"is missing: {read} ({type(value).__qualname__}) has no {step}.")
        value = found
        read += str(step)
    if type(value) in (str, int) and not field.spec:
        return str(value)  # as most are
    return _formatted(field, value)


def _follow(value: object, step: _Step) -> object:
    plain, found = canonical.settle(value), _MISSING
    if isinstance(plain, Mapping):
        found = _entry(plain, step.key)
    elif isinstance(plain, _INDEXED) and not step.is_attribute and step.key.isdecimal():
        found = plain[int(step.key)] if int(step.key) < len(plain) else _MISSING
    # A mapping's own attributes are its methods; those of a list or a text are no better.
    if found is not _MISSING or step.key.startswith("_") or isinstance(value, (Mapping, list, str)):
        return found
    return _attribute(value, step.key)


def _entry(mapping: Mapping[Any, object], key: str) -> object:
    if key in mapping:
        return mapping[key]
    wanted = canonical.key_text(key)
    for candidate in mapping:
        if not isinstance(candidate, str) and canonical.key_text(candidate) == wanted:
            return mapping[candidate]
    return _MISSING


def _attribute(value: object, name: str) -> object:
    try:
        return getattr(value, name, _MISSING)
    except Exception as error:
        if is_thrown_in(error):
            raise
        raise _Refused(f"could not be read: {error!r}") from error


def _formatted(field: _Field, value: object) -> str:
    plain = canonical.settle(value)
    if plain is None:
        raise _Refused(
            "is None, and all calls without a value would share one lock. "
            "If that is meant, give lock_key a callable that returns a name for them."
        )
    if field.as_text or not isinstance(plain, _FORMATTED):
        plain = _shown(value, plain)
    try:
        return format(plain, field.spec)
    except (ValueError, TypeError) as error:
        kind = type(value).__qualname__
        raise _Refused(f"({kind}) does not take the format {field.spec!r}: {error}.") from error


def _shown(value: object, plain: object) -> str:
    if isinstance(plain, bytes):
        try:
            return plain.decode("utf-8")
        except UnicodeDecodeError:
            return plain.hex()
    if isinstance(plain, _CONTAINERS):
        return canonical.text(value)
    return canonical.described(plain, str)
