"""What the Celery app says about locks: where they live, and the defaults of the options.

Read at each call, never written: `app.add_defaults` would go in front of what the user configured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ..core.options import OPTION_NAMES, unknown
from ..errors import LockConfigError

_PREFIX = "relock_"
_STORE_SETTINGS = ("url", "namespace", "use_ssl")
_REDIS = ("redis", "rediss", "unix", "socket", "redis+socket", "sentinel")
# A list for failover is split where the next URL starts: a password may have a semicolon.
_NEXT_URL = re.compile(r";(?=[\w+.-]+://|\Z)")
_UNSET = object()


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where an app's locks live.

    Attributes:
        url: of the Redis, with its password; or a client of redis-py, or a function that makes one.
        ssl: what Celery's `…_use_ssl` settings hold: options whose names start with `ssl_`, True
            for TLS as the URL says, or None.
        namespace: prefix of all keys.
        source: the setting that the URL came from.
    """

    url: object
    ssl: Mapping[str, Any] | bool | None = None
    namespace: str = "relock"
    source: str = "relock_url"

    def __repr__(self) -> str:
        return f"StoreSettings(namespace={self.namespace!r}, source={self.source!r})"


def store_settings(app: Any) -> StoreSettings:
    """Where this app's locks live: `relock_url`, else its result backend, else its broker.

    Raises:
        LockConfigError: none of them is a Redis, or a `relock_…` setting cannot be used.
    """
    conf = _read(app)
    namespace = _text(conf, "relock_namespace") or "relock"
    place = _get(conf, "relock_url")
    if callable(place) or hasattr(place, "connection_pool"):
        return StoreSettings(place, None, namespace)
    for source, value in _places(conf):
        for url in _urls(value):
            if source == "relock_url" or _is_redis(url):
                return StoreSettings(url, _ssl(conf, source, url), namespace, source)
    raise LockConfigError(
        "celery-relock needs a Redis, and neither the result backend nor the broker is one. "
        'Set relock_url, for example app.conf.relock_url = "redis://localhost:6379/0".'
    )


def option_defaults(app: Any) -> dict[str, object]:
    """The app-wide defaults that are set, by the names of the options.

    Raises:
        LockConfigError: there is a setting `relock_…` that nothing reads.
    """
    conf = _read(app)
    found = {name: _get(conf, _PREFIX + name) for name in OPTION_NAMES}
    return {name: value for name, value in found.items() if value is not _UNSET}


def _read(app: Any) -> Any:
    conf = app.conf
    known = {_PREFIX + name for name in (*_STORE_SETTINGS, *OPTION_NAMES)}
    for written in conf:
        name = _plain(str(written), conf.prefix or "")
        if name.startswith(_PREFIX) and name not in known:
            raise LockConfigError(f"settings: {unknown(name, _PREFIX, _STORE_SETTINGS)}")
    return app.conf  # another one by now, if nobody had read a setting before


def _plain(written: str, namespace: str) -> str:
    """The name of a setting without Celery's namespace, in lower case."""
    return written.lower().removeprefix(namespace.lower()).removeprefix("celery_")


def _get(conf: Any, name: str) -> Any:
    """A setting of ours, however it is spelt: what is set on the app before what its object says.

    `conf.get` does not do: it knows no old upper-case spellings for a setting that is not Celery's,
    and in Celery 5.4 a name behind the namespace goes before what is set on the app.
    """
    plain = (name, f"celery_{name}", f"{conf.prefix or ''}{name}")
    spellings = (*plain, *map(str.upper, plain))
    for settings in conf.maps:
        for spelling in spellings:
            try:
                return settings[spelling]
            except KeyError:
                continue
    return _UNSET


def _text(conf: Any, name: str) -> str | None:
    value = _get(conf, name)
    if value is _UNSET or value is None or value == "":
        return None
    if isinstance(value, str):
        return value
    raise LockConfigError(f"settings: {name} must be text, not {type(value).__qualname__}")


def _places(conf: Any) -> Iterator[tuple[str, Any]]:
    yield "relock_url", _text(conf, "relock_url")
    backend = conf.result_backend
    yield "result_backend", _old_backend(conf) if backend == "redis" else backend
    yield "broker_read_url", conf.broker_read_url
    yield "broker_write_url", conf.broker_write_url


def _old_backend(conf: Any) -> str:
    """`result_backend = "redis"` stands for the settings redis_host, redis_port and so on."""
    user, password = conf.get("redis_username") or "", conf.get("redis_password") or ""
    login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    host, port = conf.get("redis_host") or "localhost", conf.get("redis_port") or 6379
    return f"redis://{login}{host}:{port}/{conf.get('redis_db') or 0}"


def _urls(value: Any) -> list[str]:
    """The URLs in a setting: one, or several for failover. Locks live on the first Redis alone:
    two servers would let two runs in."""
    if isinstance(value, str):
        # A sentinel URL lists its sentinels in the same way, but is one place.
        together = value.startswith("sentinel://")
        return [value] if together else [url for url in _NEXT_URL.split(value) if url]
    if isinstance(value, Iterable):
        return [url for part in value if isinstance(part, str) for url in _urls(part)]
    return []


def _is_redis(url: str) -> bool:
    scheme, found, _ = url.partition("://")
    return bool(found) and scheme.lower() in _REDIS


def _ssl(conf: Any, source: str, url: str) -> Any:
    if source == "result_backend":
        return conf.get("redis_backend_use_ssl") or None
    if source != "relock_url":
        return conf.get("broker_use_ssl") or None
    own = _get(conf, "relock_use_ssl")
    if own is _UNSET and url.lower().startswith("rediss://"):
        return conf.get("redis_backend_use_ssl") or None
    return None if own is _UNSET else own or None
