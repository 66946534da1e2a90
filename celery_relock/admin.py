"""See, free and watch locks: for people, and for programs that people run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import engines

if TYPE_CHECKING:
    from .engine.engine import Engine


class Locks:
    """The locks of an app, or of a Redis.

    Args:
        place: a Celery app; or, without one, whatever `Lock` takes: the URL of a Redis, a client of
            redis-py, or a function that makes one.
        namespace: with a Redis: the prefix of all keys. An app has its own.

    Attributes:
        app: the Celery app, None without one.

    Raises:
        LockConfigError: the settings, or the URL, lead to no Redis.
    """

    def __init__(self, place: Any, namespace: str = engines.NAMESPACE) -> None:
        self.app: Any = place if hasattr(place, "tasks") else None
        self._engine = _engine(self.app, place, namespace)


def _engine(app: Any, place: Any, namespace: str) -> Engine:
    if app is None:
        return engines.engine_for(place, namespace)
    from .declaration import engine_of

    return engine_of(app)
