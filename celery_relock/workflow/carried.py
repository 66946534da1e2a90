"""What a message says of the sections that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..engine.lease import Lease
from ..errors import RelockError
from ..options import LockOptions
from ..worker import headers

_OPTIONS = ("ttl", "gap_ttl", "on_gap", "on_conflict", "max_wait")


class Carried(NamedTuple):
    """What a message says of a section that it belongs to. Times in seconds, as in the options."""

    id: str
    names: tuple[str, ...]
    limits: tuple[int, ...]
    fences: tuple[int, ...]
    owner: str
    ttl: float
    gap_ttl: float
    on_gap: str
    on_conflict: str
    max_wait: float | None
    #: False once the entry had ended between two steps.
    unbroken: bool = True

    def options(self, task: str) -> LockOptions:
        """How a step asks for the lock if what was left to it is gone."""
        declared = {f"lock_{name}": getattr(self, name) for name in _OPTIONS}
        if self.on_gap == "raise":
            declared |= {"lock_on_conflict": "raise", "lock_max_wait": None}
        return LockOptions.collect(declared, {}, task)


def carried_by(
    section: str, lease: Lease, fences: tuple[int, ...], options: LockOptions
) -> Carried:
    """What the steps of a section that begins with this lease are told of it."""
    of, told = lease.claim, {name: getattr(options, name) for name in _OPTIONS}
    return Carried(section, of.names, of.limits, fences, of.owner, **told)


def carried_in(message: Any) -> Iterator[Carried]:
    """The sections that a message says it belongs to. What makes no sense is left out."""
    for raw in headers.read(message).sections:
        try:
            carried = Carried(**raw)
            carried.options("")
        except (TypeError, ValueError, RelockError):
            continue
        yield carried._replace(
            names=tuple(map(str, carried.names)),
            limits=tuple(map(int, carried.limits)),
            fences=tuple(map(int, carried.fences)),
        )
