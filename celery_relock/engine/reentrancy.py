"""The leases that the running call stack holds: inline re-entry is decided by them.

A caller and the function that it calls cannot run at the same time, so an inner call may always
re-enter what an outer call holds; to let the inner call wait would be a deadlock with itself.

A context variable, because greenlets and threads each have a context of their own, and a coroutine
that runs inside a locked body sees the context of the body. Celery does not reset contexts between
tasks, so a lease that has been released no longer counts, wherever it was left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar

from ..errors import LockLost
from .lease import Lease, State
from .protocol import SHARED, Backend

_stack: ContextVar[tuple[Lease, ...]] = ContextVar("relock_stack", default=())


def push(lease: Lease) -> None:
    """Let everything that is called from here on re-enter the lease."""
    # What another thread has released is still on this thread's stack: it must not pile up.
    stack = _stack.get()
    _stack.set((*filter(_counts, stack), lease) if stack else (lease,))


def pop(lease: Lease) -> None:
    """Take the lease off the stack again, in whatever order."""
    stack = _stack.get()
    alone = len(stack) == 1 and stack[0] is lease
    _stack.set(() if alone else tuple([each for each in stack if each is not lease]))


def begin(task_id: str) -> None:
    """The body of a message begins. What was acquired for this message lies around it, as in the
    task's own `__call__`. All else on this stack is of those before it (a `Lock` in a module's
    variable, say)."""
    if stack := _stack.get():
        _stack.set(tuple([each for each in stack if each.work and each.work.id == task_id]))


def has(lease: Lease) -> bool:
    """Whether a lease is among those of this call stack, whatever has become of it."""
    return lease in _stack.get()


def holding(backend: Backend | None, name: str, shared: bool = False) -> Lease | None:
    """The innermost lease of this call stack that covers the lock name, at any backend for None.
    The lease may be lost. A lease that shares the lock covers only what is to share it, too."""
    for lease in reversed(_stack.get()):
        covers = name in lease.claim.names and (shared or not lease.shares(name))
        is_own = lease.thread is None or lease.thread == threading.get_ident()
        if covers and is_own and backend in (None, lease.backend) and _counts(lease):
            return lease
    return None


def covering(backend: Backend, names: Sequence[str], limits: Sequence[int]) -> dict[str, Lease]:
    """Those of the lock names that this call stack holds already, and by which lease.

    Raises:
        LockLost: a caller has lost its hold: nobody may rely on it.
    """
    found = {}
    for name, limit in zip(names, limits, strict=True):
        lease = holding(backend, name, limit == SHARED)
        if lease is None:
            continue
        if lease.lost:
            raise LockLost(
                f"the lock {name!r} was lost by a caller, so it cannot be re-entered here",
                name=name,
                owner=lease.claim.owner,
            )
        found[name] = lease
    return found


class Relying(ContextDecorator):
    """Around what has re-entered these leases: meanwhile they are not downgraded."""

    def __init__(self, leases: Collection[Lease]) -> None:
        self._leases = leases

    def __enter__(self) -> None:
        for lease in self._leases:
            lease.rely(self)

    def __exit__(self, *_: object) -> None:
        for lease in self._leases:
            lease.rely(self, False)


def sharing(name: str) -> Lease | None:
    """The innermost lease of this call stack that covers the lock name, if it shares the lock."""
    lease = holding(None, name, shared=True)
    return lease if lease is not None and lease.shares(name) else None


def innermost() -> Lease | None:
    """The lease that this call stack acquired last."""
    for lease in reversed(_stack.get()):
        if _counts(lease):
            return lease
    return None


def unbroken() -> bool:
    """Whether each hold of this call stack that was left to its execution was there when that
    came."""
    return all(each.unbroken for each in _stack.get() if _counts(each))


def executions() -> tuple[str, ...]:
    """The executions whose locks this call stack holds, the innermost first."""
    held = [lease for lease in reversed(_stack.get()) if _counts(lease) and not lease.lost]
    return tuple(lease.claim.execution_id for lease in held)


def stuck() -> tuple[str, ...]:
    """The executions among them whose holds cannot end before the call that is made here returns,
    or may not: the thread of a `Lock` may wait for one that runs with a copy of its context."""
    stack = _stack.get()
    if not stack:
        return ()
    # Another thread may release one of these, or nobody renews it: it is not stuck.
    held = [each for each in stack if each.renews and not each.for_any_thread and _counts(each)]
    return tuple([each.claim.execution_id for each in held])


def _counts(lease: Lease) -> bool:
    if lease.state not in (State.HELD, State.LOST) or not lease.is_here():
        return False
    # A `Lock` that was dropped without a release is nobody's any more: its lease ends it.
    return not lease.abandoned
