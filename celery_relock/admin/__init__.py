"""Inspect and release locks: for people, and for the programs that they run.

    locks = Locks(app)
    for lock in locks.find("account:*"):
        print(lock.name, lock.holders[0].task, lock.waiting)
    locks.why("7caf55a8-2f4e-4a32-8f6b-0c1a5be0d7d2").sentence
    locks.release("account:42")

Tasks do not need this module, and workers do not load it.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any

from .. import engines
from ..engine.events import extra, logger
from ..engine.inspection import (
    Holder,
    Inspectable,
    LockInfo,
    ParkedMessage,
    Waiter,
    holder_of,
    work_of,
)
from ..engine.protocol import KEPT, LINE, MARKER
from ..errors import LockConfigError, RelockError, without_locals
from ..settings import backend_settings
from .look import SHOWN, Look, Stats, Why, permit_of
from .why import Question, import_tasks

__all__ = ["SHOWN", "Holder", "LockInfo", "Locks", "Stats", "Waiter", "Why"]


_DONE = {
    "release": "lock %s: released by force by %s from %s; its holder was %s",
    "cancel": "lock %s: a parked task was cancelled by %s from %s: %s",
    "order": "lock %s: its order goes on, by force by %s from %s, without the message of %s",
}
# A task as `work_of` writes it.
_NAMED = re.compile(r"(?P<name>[^\[]+)\[(?P<id>.+)\]", re.DOTALL)


class Locks:
    """The locks of an app, or of a Redis.

    Args:
        place: a Celery app; or what `Lock` accepts: the URL of a Redis, a redis-py client, or a
            function that returns a client.
        namespace: the prefix of all keys, without an app; None for "relock". An app has its own.
        by: who acts, for the log. Default: the user of this process.
        origin: from where. Default: the host and the process id.

    Attributes:
        app (celery.Celery | None): the Celery app; None without one.
        namespace (str): the prefix of all keys.
        by (str): who acts.
        origin (str): from where.

    Every method raises LockUnavailable if Redis cannot be reached, and LockConfigError if Redis
    refuses: it lacks a permission, or its data has the layout of another version.

    Raises:
        LockConfigError: the settings or the URL do not lead to a Redis.
    """

    @without_locals
    def __init__(
        self,
        place: Any,
        namespace: str | None = None,
        *,
        by: str | None = None,
        origin: str | None = None,
    ) -> None:
        self.app: Any = place if hasattr(place, "tasks") else None
        self.by = by or _user()
        self.origin = origin or f"{socket.gethostname()}:{os.getpid()}"
        if self.app is None:
            namespace = engines.NAMESPACE if namespace is None else namespace
            self._engine = engines.engine_for(place, namespace)
        else:
            if namespace is not None:
                raise LockConfigError(
                    f"namespace={namespace!r} cannot be given with an app, which has its own "
                    "(relock_namespace)"
                )
            from ..declaration import engine_of

            self._engine = engine_of(self.app)
        backend = self._engine.backend
        if not isinstance(backend, Inspectable):
            raise LockConfigError(
                "with relock_url='memory://' or relock_enabled=False there are no locks outside of "
                "the process that works with them. In tests the fixture `relock` shows them"
            )
        self.namespace = backend_settings(self.app).namespace if namespace is None else namespace
        self._look = Look(backend)

    def find(
        self, pattern: str = "*", limit: int | None = None, *, markers: bool = False
    ) -> Iterator[LockInfo]:
        """The locks that are held or waited for, in no order, each with its oldest holder and
        its first waiter. A lock that is acquired or released meanwhile can be missing.

        Args:
            pattern: a pattern for lock names, as in Redis: `*`, `?`, `[a-z]`.
            limit: how many locks to yield at most; None for all.
            markers: yield dedup markers instead. The pattern is then for the task name, a tab and
                the lock name.

        Raises:
            LockConfigError: the limit is below 0.
        """
        if limit is not None and limit < 0:
            raise LockConfigError(f"limit={limit}: use a number from 0, or None for all")
        found = self._look.find(MARKER + pattern if markers else pattern)
        wanted = (each for each in found if each.name.startswith(MARKER) is markers)
        return islice(wanted, limit)

    def get(self, name: str, most: int = SHOWN) -> LockInfo:
        """The lock of this name. If nobody holds it or waits for it, it is `idle`.

        Args:
            name: the lock name.
            most: how many holders and how many waiters to return.
        """
        return self._look.get(name, most, most)[1]

    def with_order(self, name: str, most: int = SHOWN) -> list[LockInfo]:
        """The lock of this name, and its order with the calls whose turn has not come
        (`lock_order`), if there are any.

        Args:
            name: the lock name.
            most: how many holders and how many waiters to return of each.
        """
        lock = self.get(name, most)
        line = None if name.startswith(LINE) else self.get(LINE + name, most)
        return [lock] if line is None or line.idle else [lock, line]

    def release(
        self,
        name: str,
        task_id: str | None = None,
        *,
        permits: Collection[str | int] | None = None,
    ) -> tuple[Holder, ...]:
        """Release a lock, and its order (`lock_order`), by force. Its holders notice within a
        second: `self.lock.lost` becomes True, and `lock_on_lost` takes effect. The next waiters get
        the lock. If nobody runs in its order, the order goes on without the message that it waits
        for, such as that of a retry; if the message comes, the call runs out of order.

        A holder goes on with its work unless it checks its lock: see `Hold.fence`.

        Args:
            name: the lock name.
            task_id: release only what this task holds, or its place in the order.
            permits: release only these, and nobody who has come since somebody looked: the tokens
                of the holders, of those that share the lock their execution ids, and the execution
                id of the call without which the order is to go on. None for all.

        Returns:
            The holders whose holds were released, and the call without which the order goes on;
            empty if nobody, or not this task, held the lock.

        Raises:
            LockConfigError: the key of this name belongs to another program. Nothing was changed.
        """
        if task_id == "":  # an unset variable; and who holds a `Lock` outside of tasks has no id
            raise LockConfigError(
                "task_id is empty: give the id of a task, or None for all holders"
            )
        only = None if permits is None else set(map(str, permits))
        released = self._release(name, task_id, only)
        if name.startswith(LINE):
            return released
        known = {each.execution_id for each in released}
        return (*released, *self._release(LINE + name, task_id, only, known))

    def _release(
        self,
        name: str,
        task_id: str | None,
        permits: Collection[str] | None,
        known: Collection[str] = (),
    ) -> tuple[Holder, ...]:
        """`known`: the executions that are already told of."""
        is_all = task_id is None and permits is None
        # Those that are meant can be any of the holders, so ask for all of them.
        key, lock = self._look.get(name, 1 if is_all else 1_000_000, 1)
        if lock.foreign:
            raise LockConfigError(
                f"the key of {name!r} is in use for something else; nothing was changed", name=name
            )
        is_line = name.startswith(LINE)
        if not lock.held and not (is_line and lock.waiting):
            return ()
        only = [""] if is_all else _meant(lock, task_id, permits)
        told = [info for each in only for info in self._look.inspection.force_release(key, each)]
        released = tuple(
            holder_of(info, lock.name) for info in told if info.execution_id not in known
        )
        for holder in released:
            how = "order" if is_line and holder.owner == KEPT else ""
            of = (name.removeprefix(LINE),), holder.task, holder.task_id, holder.token
            self._tell("release", *of, how=how)
        return released

    def cancel(self, task_id: str) -> bool:
        """End a parked task, as a revoke does: it leaves the queue, its state is REVOKED, its chord
        is notified, its dedup marker is released, `task_revoked` is sent. No worker is needed. If
        this process dies halfway, the task has left the queue without a state.

        A call whose message is awaited in an order (`lock_order`), such as that of a retry, leaves
        the order and is revoked: all this happens when its message comes to a worker.

        Args:
            task_id: the task's id.

        Returns:
            True if the task was parked, or awaited in an order, and its place is free now. False
            if not; then end it with `app.control.revoke`.

        Raises:
            RelockError: there is no app, the app does not have the task, or the message cannot be
                read: nothing was changed. Or the state REVOKED could not be stored: the task has
                left the queue.
        """
        if self.app is None:
            raise LockConfigError(
                "Cancelling a task needs its app, which stores the state REVOKED: Locks(app), or "
                "celery -A APP relock cancel … without --redis"
            )
        found = self._look.parked(task_id)
        if found is None:
            return False
        if not found.text:
            return self._cancel_awaited(task_id, found)
        request = _request_of(self.app, found.text)
        is_out = found.waiter.sent > 0
        withdrawn = list(map(self._engine.parking.withdraw, self._copies(found)))
        if not any(withdrawn):
            return False
        names = [name.removeprefix(LINE) for name in found.waiter.names]
        self._tell("cancel", names, request.name, task_id)
        _revoke(self.app, request, is_out)
        return True

    def _copies(self, found: ParkedMessage) -> list[str]:
        """The executions of a parked task: each worker has its own of a broadcast."""
        if not json.loads(found.text).get("receiver"):
            return [found.waiter.execution_id]
        waiters = self._look.get(found.name, 1, 1_000_000)[1].waiters
        return [each.execution_id for each in waiters if each.task_id == found.waiter.task_id]

    def _cancel_awaited(self, task_id: str, found: ParkedMessage) -> bool:
        from ..worker.states import show_revoked

        of = found.waiter.execution_id
        import_tasks(self.app)
        # Not one that runs: its message can come again.
        if found.waiter.state != "awaited" or not self._engine.parking.withdraw(of):
            return False
        name = found.waiter.task
        self._tell("cancel", (found.name.removeprefix(LINE),), name, task_id, how="order")
        if (task := self.app.tasks.get(name)) is not None:
            # A worker that starts later knows of no revoke.
            show_revoked(task, task_id, "cancelled")
        # After that: a worker that hears of it withdraws the call itself.
        _tell_workers(self.app, task_id)
        return True

    def why(self, task_id: str) -> Why:
        """Why a task does not run, or what it does.

        Asks Redis, then the result backend, then the workers, which have a second to answer: five
        round trips at most. If nobody knows of the task, or it waits for its retry, or its state is
        REVOKED and no worker that answers has it, or a worker that runs it does not know its lock,
        all locks are searched for it, with at most a thousand holders and `SHOWN` waiters of each.
        So is a step whose workflow is parked.

        Args:
            task_id: the task's id.
        """
        return Question(self.app, self._look, self._engine.backend.consumed, task_id).answer()

    def id_of(self, text: str) -> str:
        """The id of the task that somebody typed, or pasted as lines of the log and the commands
        print it: `shop.charge[…]`.

        An id can look so itself. If no task of the app has that name, which can be shortened, all
        is done for the whole text that `why` does: it is the id if anything is known of it.

        Args:
            text: what was typed.
        """
        whole = text.strip()
        named = _NAMED.fullmatch(whole)
        if named is None:
            return whole
        if self.app is not None:
            import_tasks(self.app)
            if named["name"] in self.app.tasks:
                return named["id"]
        return named["id"] if self.why(whole).state == "unknown" else whole

    def stats(self) -> Stats:
        """Count all locks. Reads every lock, as `find` does, and all holders of one whose oldest
        holder cools down."""
        return Stats.of(self._look.find("*", past_cooldowns=True))

    def _tell(
        self,
        action: str,
        names: Sequence[str],
        task: str,
        task_id: str,
        token: int = 0,
        *,
        how: str = "",
    ) -> None:
        """Announce a forced release or a cancelled task: in the log, by the signal `lock_forced`,
        and by the event `lock-forced`."""
        from .. import signals

        facts = {"action": action, "by": self.by, "origin": self.origin, "fence": token}
        logger.warning(
            _DONE[how or action],
            *(", ".join(map(repr, names)), self.by, self.origin),
            work_of(task, task_id) or "unnamed",
            extra=extra("forced", names, task, task_id, **facts),
        )
        known = None if self.app is None else self.app.tasks.get(task)
        of = {"names": tuple(names), "task_id": task_id, "task_name": task}
        signals.send(signals.lock_forced, sender=known, **of, **facts)
        if self.app is not None:
            fields = {"name": task, "locks": list(names), **facts}
            _send_event(self.app, "lock-forced", task_id, fields)


def _meant(lock: LockInfo, task_id: str | None, permits: Collection[str] | None) -> Iterator[str]:
    """The executions whose holds, or place at the head of an order, somebody means to release."""
    for holder in lock.holders:
        if task_id in (None, holder.task_id) and (permits is None or permit_of(holder) in permits):
            yield holder.execution_id
    for first in lock.waiters if lock.name.startswith(LINE) and not lock.held else ():
        # An order in which nobody waits for the first call stays as it is, unless it is named.
        is_named = task_id is not None or lock.parked > 0 or first.since < lock.at
        is_meant = permits is None or first.execution_id in permits
        if task_id in (None, first.task_id) and is_meant and is_named:
            yield first.execution_id


def _request_of(app: Any, text: str) -> Any:
    """A parked message, as a worker would have received it.

    Raises:
        RelockError: the app does not have its task, or the message cannot be read.
    """
    from celery.worker.request import Request

    from ..worker.message import that_tells_its_end
    from ..worker.parking import message_in

    message = message_in(app, text)
    import_tasks(app)
    try:
        task = app.tasks.get(message.headers["task"])
        if task is not None:
            return that_tells_its_end(Request)(message, app=app, task=task)
    except Exception as error:
        raise RelockError(f"the parked message cannot be read: {error!r}") from error
    raise RelockError(
        f"the parked message is of the task {message.headers['task']!r}, which this app "
        f"({app.main or 'without a name'}) does not have: use the app that sent it. If no app has "
        "it any more, revoke it (control revoke): the worker to which it comes then discards it"
    )


def _revoke(app: Any, request: Any, is_out: bool) -> None:
    """Do what a worker does with a revoked message. `is_out`: the broker can have a copy of it."""
    from celery.worker.state import revoked

    # Its receiver of `task_revoked` clears away what the call leaves.
    from ..worker import leftovers  # noqa: F401
    from ..worker.states import tells_no_state

    revoked.add(request.id)
    try:
        request.revoked()
    except Exception as error:
        raise RelockError(
            f"{request.name}[{request.id}] has left the queue of its lock, and its state REVOKED "
            f"could not be stored: {error!r}"
        ) from error
    finally:
        revoked.discard(request.id)
    # `state`: without it a monitor would go on showing BLOCKED (`worker.events.show`).
    fields = {"terminated": False, "signum": None, "expired": False, "state": "REVOKED"}
    _send_event(app, "task-revoked", request.id, fields)
    if is_out and tells_no_state(request.task, request._context):
        # No stored state tells its worker that it was cancelled.
        _tell_workers(app, request.id)


def _tell_workers(app: Any, task_id: str) -> None:
    from ..worker.broker import remote_control

    try:
        control = remote_control(app)
        if control is None:
            raise RelockError("they hear no remote control")
        control.revoke(task_id)
    except Exception as error:  # noqa: BLE001  # whatever a broker's client raises
        logger.warning("Cannot tell the workers that %s is revoked: %s", task_id, error)


def _send_event(app: Any, kind: str, task_id: str, fields: dict[str, Any]) -> None:
    from ..worker.events import dispatcher

    try:
        with dispatcher(app, kind) as sender:
            sender.send(kind, uuid=task_id, **fields)
    except Exception as error:  # noqa: BLE001  # whatever a broker's client raises
        logger.warning("Cannot send the event %s: %s", kind, error)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid {os.getuid()}"
