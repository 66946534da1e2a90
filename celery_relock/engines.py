"""The engines of this process: one for each namespace of a Redis and each way to reach it, so that
all its locks share connections and an inbox; and the engines of locks in memory.

No other module outside of `backends` imports both the engine and a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import redis
from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException

from .backends.redis.backend import LaterBackend, RedisBackend
from .backends.redis.connections import Replicas, Transport
from .backends.redis.keys import Keys
from .backends.redis.urls import safe_url, transport_for_client, transport_for_url
from .engine import ids
from .engine.engine import Engine
from .engine.interrupt import is_thrown_in
from .engine.platform import Guard
from .errors import LockConfigError, LockUnavailable, without_locals

NAMESPACE = "relock"
#: The URL of locks in the memory of this process, for tests.
MEMORY = "memory://"
# Engines to keep for URLs that no lock uses: those of the most recently used URLs.
MOST_URLS = 100

# Keys are digests, because URLs contain passwords. An engine lives as long as one of its clients,
# the function that returned the client (or its object, if that is a method), or one of its locks.
_engines: WeakValueDictionary[str, Engine] = WeakValueDictionary()
_by_url: dict[str, Engine] = {}
_guard = Guard()
_by_client: WeakKeyDictionary[Any, dict[tuple[Any, ...], Engine]] = WeakKeyDictionary()
# Those whose function could not connect, by its id: they have the function, to call it again, so it
# must not have them. They live as long as one of their locks.
_unmade: WeakValueDictionary[tuple[Any, ...], Engine] = WeakValueDictionary()
# By namespace. They live as long as the process, because the locks exist nowhere else.
_in_memory: dict[str, Engine] = {}


@without_locals
def engine_for(
    address: object,
    namespace: str = NAMESPACE,
    ssl: Mapping[str, Any] | bool | None = None,
    transport: Mapping[str, Any] | None = None,
    replicas: tuple[int, float] = (0, 1.0),
    loops: bool = False,
) -> Engine:
    """The engine for the locks in one Redis.

    Args:
        address: a URL (`memory://` for locks in this process), a redis-py client, or a function
            that returns a client. Clients that reach a server in the same way share an engine. The
            function is called once per process, at the first use of a lock, and again if it failed
            to connect; a method once for its object, if that can be hashed. No client sends a
            command: its address, credentials and options are used.
        namespace: the prefix of all keys.
        ssl: TLS options of a URL. A client has its own.
        transport: Sentinel options of a URL. A client has its own.
        replicas: how many replicas must have a hold before it is valid, and within how many
            seconds.
        loops: whether coroutines will use the locks; then `address` can be a redis.asyncio client.

    Raises:
        LockConfigError: the address, one of its options or the namespace cannot be used.
    """
    if isinstance(address, str) and address.lower().startswith("memory:"):
        return _in_this_process(address, namespace)
    needed = Replicas(*replicas).checked()
    if isinstance(address, str):
        return _for_url(address, namespace, ssl, transport, needed)
    if callable(address) and not isinstance(address, type) and not _is_task(address):
        return _for_factory(address, namespace, needed, loops)
    return _for_client(address, namespace, needed, loops)


@cache
def engine_without_locks() -> Engine:
    """The engine of `relock_enabled=False`."""
    from .backends.off import NoLocks

    return Engine(NoLocks())


def shown(address: object) -> str:
    """An address of locks for people, without its password."""
    return safe_url(address) if isinstance(address, str) else "the Redis of a client"


def _in_this_process(url: str, namespace: str) -> Engine:
    if url.lower() != MEMORY:
        raise LockConfigError(
            f"{url!r}: memory:// has no host, path or option. To keep locks of one process apart, "
            "use relock_namespace"
        )
    from .backends.memory import MemoryBackend

    Keys(namespace)  # refuse what Redis would refuse
    return _in_memory.setdefault(namespace, Engine(MemoryBackend()))


def _for_url(
    url: str,
    namespace: str,
    ssl: Mapping[str, Any] | bool | None,
    transport: Mapping[str, Any] | None,
    replicas: Replicas,
) -> Engine:
    key = _digest(url, namespace, ssl, transport, replicas)
    # Pop and insert again, so that the most recently used URL is the last.
    found = _by_url.pop(key, None)
    if found is None:
        found = _engine(transport_for_url(url, ssl, transport, replicas), namespace)
    _by_url[key] = found
    for old in list(_by_url)[:-MOST_URLS]:
        _by_url.pop(old, None)
    return found


def _for_factory(
    make: Callable[[], object], namespace: str, replicas: Replicas, loops: bool
) -> Engine:
    # A bound method is a new object each time it is read.
    of, which = (make.__self__, make.__func__) if isinstance(make, MethodType) else (make, None)
    made, key = _of(of), (which, namespace, replicas)
    unmade = id(of), *key
    found = made.get(key) or _unmade.get(unmade)
    if found is None:
        try:
            found = made[key] = _for_client(_called(make), namespace, replicas, loops)
        except LockUnavailable:
            # An outage is told where each other one is: by what needs the Redis, each time.
            def later() -> Transport:
                return transport_for_client(_checked(_called(make), loops), replicas)

            found = Engine(LaterBackend(later, namespace, replicas.needed > 0))
            _unmade[unmade] = found
    return found


def _called(make: Callable[[], object]) -> object:
    try:
        return make()
    except Exception as error:
        if is_thrown_in(error):
            raise
        name = getattr(make, "__qualname__", repr(make))
        # A RedisCluster connects when it is made, so this can be an outage.
        outage = OSError, redis.ConnectionError, redis.TimeoutError, RedisClusterException
        kind = LockUnavailable if isinstance(error, outage) else LockConfigError
        said = f"{type(error).__name__}: {error}"  # redis-py's have a repr that says little
        raise kind(f"{name}() failed to make a Redis client: {said}") from error


def _for_client(client: object, namespace: str, replicas: Replicas, loops: bool) -> Engine:
    made: Any = _checked(client, loops)
    clusters = RedisCluster | redis.asyncio.RedisCluster
    kept = made.nodes_manager if isinstance(made, clusters) else made.connection_pool
    found = _of(kept)
    if (namespace, replicas) not in found:
        found[namespace, replicas] = _engine(transport_for_client(made, replicas), namespace)
    return found[namespace, replicas]


def _checked(client: object, loops: bool) -> Any:
    for_threads = redis.Redis | RedisCluster
    for_loops = redis.asyncio.Redis | redis.asyncio.RedisCluster
    wanted = for_threads | for_loops if loops else for_threads
    if not isinstance(client, wanted):
        kind = f"{type(client).__module__}.{type(client).__qualname__}"
        raise LockConfigError(
            "a lock needs the URL of a Redis, a redis.Redis client, or a function that returns a "
            f"client, not {kind}{_hint(client, kind)}"
        )
    if _is_fake(client):
        raise LockConfigError(
            "fakeredis keeps everything in the memory of one process, so a lock in a forked worker "
            "would silently exclude nobody. Use relock_url='memory://', or Lock('memory://', …), "
            "which fails in a forked worker"
        )
    return client


def _hint(what: object, kind: str) -> str:
    """What to give instead of an object that is not a client."""
    if kind.startswith("redis.asyncio."):
        return ". For this client use celery_relock.asyncio.Lock."
    if hasattr(what, "send_task") or _is_task(what):
        return (
            f", a Celery {'task' if _is_task(what) else 'app'}. Give the URL, "
            "Lock(app.conf.relock_url, …), or use the lock of a call: task.lock_for(…)."
        )
    if ".cache" in kind or kind == "django.utils.connection.ConnectionProxy":
        return ', a cache. With django-redis, give django_redis.get_redis_connection("default").'
    return "."


def _is_task(what: object) -> bool:
    """Whether it is a task or a signature: to call one runs the task's body. (The class is that of
    the task behind a proxy; a mock's has no such attribute.)"""
    return hasattr(what.__class__, "apply_async")


def _is_fake(client: redis.Redis | RedisCluster) -> bool:
    kinds = type(client).__mro__
    return any(kind.__module__.partition(".")[0] == "fakeredis" for kind in kinds)


def _of(what: Any) -> dict[tuple[Any, ...], Engine]:
    try:
        return _by_client.setdefault(what, {})
    except TypeError:  # not hashable, or without weak references
        return {}


def _engine(made: Transport, namespace: str) -> Engine:
    # An engine connects later: if two threads create it at the same time, one engine is discarded.
    key, engine = _digest(made.fingerprint, namespace), Engine(RedisBackend(made, namespace))
    with _guard.lock:  # `setdefault` of this dictionary is not one step
        return _engines.setdefault(key, engine)


def _digest(*parts: object) -> str:
    return ids.digest(repr(parts).encode())
