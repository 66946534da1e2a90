"""Reentrant locks for Celery tasks, kept in Redis.

    from celery_relock import LockedTask

    @app.task(base=LockedTask, lock_key="account:{account_id}")
    def charge(account_id, amount): ...

`LockedTask` is the base of a locked task, `self.lock` in its body is its `Hold`, `locked` holds a
lock for a whole canvas, and `Lock` is a lock outside of tasks. The modules for users are `errors`,
`signals`, `asyncio` (a `Lock` for coroutines), `admin` (look at locks and release them), `doctor`,
`contrib` (metrics, Django, fenced writes) and `testing` (a pytest plugin).

https://celery-relock.readthedocs.io/
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.hold import Hold as Hold
    from .lock import Lock as Lock
    from .task import LockedTask as LockedTask
    from .version import __version__ as __version__
    from .worker.states import is_dropped as is_dropped
    from .workflow.locked import locked as locked

__all__ = ["Hold", "Lock", "LockedTask", "is_dropped", "locked"]

# LockedTask comes from the module that also registers the canvases of `locked` in workers.
_HOMES = {
    "Hold": ".engine.hold",
    "Lock": ".lock",
    "LockedTask": ".workflow.locked",
    "is_dropped": ".worker.states",
    "locked": ".workflow.locked",
    "__version__": ".version",
}


if not TYPE_CHECKING:  # else a module that is not there passes for a name of any type

    def __getattr__(name: str) -> Any:
        # Loaded when first asked for: a client that only publishes needs neither redis-py nor
        # scripts.
        if name in _HOMES:
            return getattr(import_module(_HOMES[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
