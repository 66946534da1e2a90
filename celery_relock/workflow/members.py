"""`locked(group(…))`: a group whose members are sent by the task that enters their section.

Celery counts, merges and upgrades a group by its type and its members, so the locked one is a
group and has as many. Its members are what the steps in them are, but for one thing: they are not
sent one by one. Each leaves what was to be sent with the others, and the last of them sends a
single message, which takes the lock and then sends them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias
from uuid import NAMESPACE_OID, uuid5

from celery.canvas import Signature, _chain, group, maybe_signature

from ..errors import LockConfigError
from . import enter as opening
from . import marks
from .enter import ENTER

# What a message is sent with, when, and for whom: for the one that enters and not for the members.
_SENDING = (
    "producer",
    "connection",
    "router",
    "countdown",
    "eta",
    "expires",
    "root_id",
    "parent_id",
)
# What it is like, and where it goes: for all of them.
_ROUTE = ("queue", "exchange", "routing_key", "priority")
_LIKE = (*_ROUTE, "serializer", "compression", "retry", "retry_policy")
# Members wait for the others of so many sections at most: what could not be sent as a whole, as an
# error came in between, stays behind.
_MOST = 64

_Key: TypeAlias = tuple[str, str]
_waiting: ContextVar[tuple[tuple[_Key, tuple[Any, ...]], ...]] = ContextVar(
    "relock_members", default=()
)


class LockedGroup(group):  # type: ignore[misc]  # Celery ships no types
    """The group that `locked` returns. Applied here and now, it is one lock around the whole."""

    _spec: Mapping[str, Any]

    @classmethod
    def of(cls, members: Any, spec: Mapping[str, Any]) -> LockedGroup:
        """The group as one of this class."""
        members.__class__, members._spec = cls, spec
        made: LockedGroup = members
        return made

    def clone(self, *args: Any, **kwargs: Any) -> LockedGroup:
        return self.of(super().clone(*args, **kwargs), self._spec)

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        result = super().apply_async(*args, **kwargs)
        if "members" in self._spec and not self.app.conf.task_always_eager:
            result.parent = self.app.AsyncResult(_enter_id(result.id, self._spec))
        return result

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        with opening.held(self.app, self._spec):
            return super().apply(*args, **kwargs)


@Signature.register_type(name=marks.MEMBER)
class Member(_chain):  # type: ignore[misc]
    """One step of a locked group. A chain of one, as that is what Celery looks into."""

    def __init__(self, step: Any, spec: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self.kwargs.update(tasks=[step], spec=spec)
        self.subtask_type = marks.MEMBER

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], app: Any = None) -> Member:
        inner = d["kwargs"]
        return cls(
            maybe_signature(inner["tasks"][0], app=app), inner["spec"], app=app, **d["options"]
        )

    def freeze(self, *args: Any, **kwargs: Any) -> Any:
        return self.tasks[0].freeze(*args, **kwargs)

    _freeze = freeze

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if self.app.conf.task_always_eager:
            return self.apply(args, kwargs, **options)
        spec, given = self.kwargs["spec"], {k: v for k, v in options.items() if v is not None}
        step, own = self.tasks[0].clone(), {**self.options, **given}
        if "group_id" not in own:
            raise self._taken_out()
        for name in (*_SENDING, "add_to_parent"):
            if name in given:
                del own[name]
        _, _, step.options = step._merge(options=own)
        key = (own["group_id"], spec["section"])
        together = (*dict(_waiting.get()).get(key, ()), step)
        _leave(key, together if len(together) < spec["members"] else ())
        if len(together) < spec["members"]:
            return None
        told = {name: given[name] for name in (*_SENDING, *_LIKE) if name in given}
        around = _sections_of(together, spec["section"])
        if around:
            marks.stamp(told, around, told)
        told.update(task_id=_enter_id(key[0], spec), chain=list(reversed(together)))
        # A task that sends a group has that for a child, and not what goes ahead of it.
        enter = self.app.tasks[ENTER]
        return enter.apply_async((*(args or ()), spec), kwargs or {}, add_to_parent=False, **told)

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        with opening.held(self.app, self.kwargs["spec"]):
            return self.tasks[0].apply(args, kwargs, **options)

    def stamp(self, *args: Any, **kwargs: Any) -> Any:
        return self.tasks[0].stamp(*args, **kwargs)

    def link(self, callback: Any) -> Any:
        return self.tasks[0].link(callback)

    def link_error(self, errback: Any) -> Any:
        return self.tasks[0].link_error(errback)

    def set_immutable(self, immutable: bool) -> None:
        self.tasks[0].set_immutable(immutable)

    def unchain_tasks(self) -> Any:
        raise self._taken_out()

    def _taken_out(self) -> LockConfigError:
        return LockConfigError(
            "a member of locked(group(…)) goes with the whole group: it cannot be sent by itself, "
            f"or be put into a chain. Lock that step by itself: {self.tasks[0]!r:.200}"
        )


def wrap(signature: Any, step: Callable[[Any], Any]) -> Any:
    """A group with each of its members, and those of the groups in it, replaced."""
    if not isinstance(signature, group):
        # Celery leaves out an empty chain.
        return step(signature) if next(marks.steps(signature), None) is not None else signature
    signature.tasks = [wrap(maybe_signature(each), step) for each in signature.tasks]
    return signature


def count(signature: Any) -> int:
    """How many members a group has, with those of the groups in it."""
    if signature.get("subtask_type") == "group":
        return sum(map(count, signature["kwargs"]["tasks"]))
    return int(next(marks.steps(signature), None) is not None)


def _leave(key: _Key, steps: tuple[Any, ...]) -> None:
    others = tuple(each for each in _waiting.get() if each[0] != key)
    _waiting.set((*others, (key, steps))[-_MOST:] if steps else others)


def _enter_id(group_id: str, spec: Mapping[str, Any]) -> str:
    return str(uuid5(NAMESPACE_OID, f"{group_id} {spec['section']}"))


def _sections_of(steps: tuple[Any, ...], own: str) -> list[str]:
    """The sections around this one: those that all steps belong to."""
    every = [marks.marked(each.get("options")) for step in steps for each in marks.steps(step)]
    return [name for name in every[0] if name != own and all(name in each for each in every)]
