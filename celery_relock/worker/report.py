"""What a worker tells of its locks in `celery inspect stats`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from ..declaration import engine_of, locked_tasks
from ..errors import RelockError
from ..settings import backend_settings, name_prefix
from ..version import __version__
from . import company, parking


def report(app: Any) -> dict[str, Any]:
    """Plain values: versions, where the locks are, which tasks have locks, what runs beside.
    Nothing is asked of Redis."""
    told: dict[str, Any] = {
        "version": __version__,
        "redis-py": redis.__version__,
        "tasks": {each.options.task: key_of(each.options.key) for each in locked_tasks(app)},
        "limits": {each.options.task: key_of(each.options.limit) for each in locked_tasks(app)},
        "beside": company.tracers(),
        "homes": sorted(parking.homes(app)),
    }
    try:
        told["prefix"] = key_of(name_prefix(app))
        backend = engine_of(app).backend
        told |= {"namespace": backend_settings(app).namespace, "backend": backend.id}
    except RelockError as error:
        told["problem"] = str(error)
    return told


def key_of(key: Any) -> str:
    """A `lock_key`, a `lock_limit` or `relock_prefix` as text, the same in each process: of a
    function its name."""
    if isinstance(key, Mapping):
        return f"{{{', '.join(f'{key_of(part)}: {key_of(each)}' for part, each in key.items())}}}"
    if isinstance(key, list | tuple):
        return f"[{', '.join(map(key_of, key))}]"
    if callable(key):
        # A method that is built in (`str.upper`) has no module, an instance no name.
        module = getattr(key, "__module__", type(key).__module__)
        return f"{module}.{getattr(key, '__qualname__', type(key).__qualname__)}"
    return repr(key)
