"""Which steps of a canvas belong to a section: a stamp in each, that Celery carries along.

Stamps stay on a signature through cloning, serialising, chaining and retries, and are not passed on
to what a step's body sends. The values here are plain dicts as well as signatures: the rest of a
running chain is a list of dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

#: The name of the stamp. Its value is the list of the section ids, the outermost first.
STAMP = "relock_sections"

#: The kind of signature that a member of a locked group is (see `members`).
MEMBER = "relock_member"

Step = MutableMapping[str, Any]


def steps(signature: Step) -> Iterator[Step]:
    """Every task of a canvas that is sent when all before it succeed, links included. Error
    callbacks are not: what they tell of has failed, and its section is over."""
    kind, inner = signature.get("subtask_type"), signature.get("kwargs") or {}
    if kind == "chord":
        yield from _all(inner["header"])
        yield from steps(inner["body"])
    elif kind in ("chain", "group", MEMBER):
        yield from _all(inner["tasks"])
    else:
        yield signature
    yield from _all((signature.get("options") or {}).get("link") or ())


def mark(signature: Step, section: str, which: Callable[[Step], bool] = lambda _: True) -> None:
    """Let every step of a canvas, or those that a function picks, belong to a section."""
    for step in steps(signature):
        options = step.setdefault("options", {})
        before = marked(options)
        if section not in before and which(step):
            stamp(options, [*before, section], options)


def stamp(fields: MutableMapping[str, Any], sections: list[str], stamps: Any) -> None:
    """Write the stamp, into a signature's options or a message's headers."""
    names = fields.get("stamped_headers") or ()
    fields["stamped_headers"] = [*(name for name in names if name != STAMP), STAMP]
    stamps[STAMP] = sections


def marked(stamps: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The sections that a signature's options, or a message's stamps, name."""
    found = (stamps or {}).get(STAMP)
    return tuple(found) if isinstance(found, list | tuple) else ()


def feed(signature: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Give arguments to the first steps of a canvas, which then take none from who sends them."""
    kind, inner = signature.get("subtask_type"), signature.get("kwargs") or {}
    if kind in ("chain", MEMBER):
        feed(inner["tasks"][0], args, kwargs)
    elif kind in ("chord", "group"):
        for each in _members(inner["header" if kind == "chord" else "tasks"]):
            feed(each, args, kwargs)
    elif not signature.get("immutable"):
        signature["args"] = (*args, *(signature.get("args") or ()))
        signature["kwargs"] = {**inner, **kwargs}
        signature["immutable"] = True


def _all(signatures: Any) -> Iterator[Step]:
    for each in _members(signatures):
        yield from steps(each)


def _members(signatures: Any) -> Any:
    """A list of them; a single one, or a group in place of its members, is accepted too."""
    if isinstance(signatures, Mapping):
        return signatures["kwargs"]["tasks"] if _is_group(signatures) else [signatures]
    return signatures


def _is_group(signature: Mapping[str, Any]) -> bool:
    return signature.get("subtask_type") == "group"
