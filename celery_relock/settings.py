"""The `relock_…` settings of a Celery app: where locks live, and the defaults of the options.

They are read when a task is declared, or its engine first needed, and never written:
`app.add_defaults` would override the user's values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, NamedTuple

from .engine.protocol import MOST_PARKED, REMEMBER
from .errors import LockConfigError, without_locals
from .naming.callables import called
from .options import OPTION_NAMES, SECONDS_ABOVE_0, Check, above_zero, count, flag, that, unknown

_PREFIX = "relock_"
#: The settings that are not options of a task, without `relock_`. Every option is also a setting.
SETTINGS = (
    *("url", "namespace", "use_ssl", "transport_options"),
    *("min_replicas", "min_replicas_timeout", "prefix", "enabled"),
    *("remember", "max_parked_messages", "max_parked_bytes"),
)
#: All settings, as they are written.
KNOWN = frozenset(_PREFIX + name for name in (*SETTINGS, *OPTION_NAMES))
# The transport options of Celery that we read, and those of `relock_transport_options`.
_TRANSPORT = ("master_name", "sentinel_kwargs", "min_other_sentinels")
_OWN_TRANSPORT = (*_TRANSPORT, "patience")
_REDIS = ("redis", "rediss", "unix", "socket", "redis+socket", "sentinel")
# Celery's settings for what the URL of its result backend lacks.
_LOGIN = {
    "username": "redis_username",
    "password": "redis_password",
    "credential_provider": "redis_backend_credential_provider",
}
# Split a list of URLs where the next URL starts: a password can contain a semicolon.
_NEXT_URL = re.compile(r";(?=[\w+.-]+://|\Z)")
_UNSET = object()
# How late a broker can be with a message that it delivers again, in seconds: kombu looks for those
# of Redis every 100 s, when a worker has time to look.
_LATE = 600.0


class BackendSettings(NamedTuple):
    """Where an app's locks live.

    Attributes:
        url: the URL of the Redis, with its password; a redis-py client; a function that returns a
            client; or `memory://`.
        ssl: the value of Celery's `…_use_ssl`: options whose names start with `ssl_`, True for TLS
            as the URL says, or None.
        namespace: the prefix of all keys.
        source: the setting that the URL came from.
        transport: the part of Celery's `…_transport_options` that is for Sentinels; and `login`,
            what the URL of the result backend lacks.
        replicas: how many replicas must have a hold, and within how many seconds.
        remember: for how many seconds an execution that has ended is remembered.
        most_parked: how many messages can be parked for all locks together, and of how many bytes.
    """

    url: object
    ssl: Mapping[str, Any] | bool | None = None
    namespace: str = "relock"
    source: str = "relock_url"
    transport: Mapping[str, Any] | None = None
    replicas: tuple[int, float] = (0, 1.0)
    remember: float = REMEMBER
    most_parked: tuple[int, int] = MOST_PARKED

    @property
    def in_memory(self) -> bool:
        """Whether locks live in the memory of each process, for tests."""
        return isinstance(self.url, str) and self.url.lower().startswith("memory:")

    def __repr__(self) -> str:
        return f"BackendSettings(namespace={self.namespace!r}, source={self.source!r})"


@without_locals
def backend_settings(app: Any) -> BackendSettings:
    """Where this app's locks live: `relock_url`, else its result backend, else its broker.

    Raises:
        LockConfigError: none of them is a Redis, or a `relock_…` setting cannot be used.
    """
    conf = _read(app)
    beside = _beside_the_url(conf)
    given = _get(conf, "relock_url")
    if callable(given) or hasattr(given, "connection_pool") or hasattr(given, "nodes_manager"):
        _refuse_options_of_a_url(conf, "relock_url is a client, which has its own")
        return BackendSettings(given, **beside)
    if (own := _own_url(conf)) is not None:
        transport = _own_transport(conf, own)
        return BackendSettings(own, _own_ssl(conf, own), transport=transport, **beside)
    for source in ("result_backend", "broker_read_url", "broker_write_url"):
        value, is_backend = getattr(conf, source), source == "result_backend"
        for url in _urls(_old_backend(conf) if is_backend and value == "redis" else value):
            if _is_redis(url):
                _refuse_options_of_a_url(conf, f"the locks live in the {source}, which has its own")
                ssl = conf.get("redis_backend_use_ssl" if is_backend else "broker_use_ssl")
                of = "result_backend" if is_backend else "broker"
                theirs = conf.get(f"{of}_transport_options") or {}
                options = {name: theirs[name] for name in _TRANSPORT if name in theirs}
                if is_backend and (login := _login(conf)):
                    options["login"] = login
                return BackendSettings(
                    url, ssl or None, source=source, transport=options or None, **beside
                )
    raise LockConfigError(
        "celery-relock needs a Redis, and neither the result backend nor the broker is one. "
        'Set relock_url, for example app.conf.relock_url = "redis://localhost:6379/0"; in tests '
        '"memory://" keeps the locks in the process.'
    )


def in_memory(app: Any) -> bool:
    """Whether the locks are in the memory of this process. False if the settings are wrong, which
    is told where the engine is asked for."""
    try:
        return enabled(app) and backend_settings(app).in_memory
    except LockConfigError:
        return False


@without_locals
def enabled(app: Any) -> bool:
    """`relock_enabled`, True by default.

    Raises:
        LockConfigError: the value is not True or False. The text "False" of an environment variable
            would otherwise count as True.
    """
    return bool(_checked(_read(app), "enabled", True, flag, "True or False"))


@without_locals
def read_by_tasks(app: Any) -> dict[str, object]:
    """Those settings that a task reads when it is declared, by their names without `relock_`: the
    defaults of its options, and the prefix.

    Raises:
        LockConfigError: there is an unknown setting `relock_…`.
    """
    conf = _read(app)
    found = {name: _get(conf, _PREFIX + name) for name in ("prefix", *OPTION_NAMES)}
    return {name: value for name, value in found.items() if value is not _UNSET}


@without_locals
def name_prefix(app: Any) -> str | Callable[[], str]:
    """`relock_prefix`, the text before each lock name, or a function to be called for each name.

    Raises:
        LockConfigError: `relock_prefix` is neither text nor callable. The returned function raises
            it if the user's callable fails or does not return text.
    """
    value = _get(_read(app), "relock_prefix")
    if not callable(value):
        return _text(app.conf, "relock_prefix") or ""

    @wraps(value)
    def prefix() -> str:
        made = called("settings: the callable in relock_prefix", value)
        if isinstance(made, str):
            return made
        raise LockConfigError(
            f"settings: the callable in relock_prefix must return text, not {made!r:.100}"
        )

    return prefix


def _namespace(conf: Any) -> str:
    value = _text(conf, "relock_namespace")
    if value == "":
        raise LockConfigError(
            "settings: relock_namespace is empty. It is the prefix of all keys in Redis: set a "
            'text, or leave it out for "relock".'
        )
    return value or "relock"


def _read(app: Any) -> Any:
    # Reading the first setting replaces Celery's pending configuration.
    conf = app.conf.finalize()
    for written, name in plain_names(conf).items():
        before = written[: len(written) - len(name)]
        if name.startswith(_PREFIX) and name not in KNOWN:
            prefix = written[: len(before) + len(_PREFIX)]
            raise LockConfigError(f"settings: {unknown(written, prefix, SETTINGS)}")
        if name in KNOWN and written[len(before) :] not in (name, name.upper()):
            raise LockConfigError(
                f"settings: {written} is not read, as small and capital letters are mixed. Write "
                f"{name}."
            )
        if name.removeprefix("lock_") in OPTION_NAMES and name.startswith("lock_"):
            meant = f"{_PREFIX}{name.removeprefix('lock_')}"
            raise LockConfigError(
                f"settings: {written} is an option of a task. The default for all tasks of the app "
                f"is {before}{meant.upper() if written.isupper() else meant}."
            )
    return conf


def plain_names(conf: Any) -> dict[str, str]:
    """What an app's configuration has for Celery: each name as it is written, and in lower case
    without Celery's namespace."""
    namespace, found = (conf.prefix or "").lower(), {}
    for settings in conf.maps:
        for written in map(str, settings):
            name = written.lower()
            if name.startswith(namespace) and namespace:
                found[written] = name.removeprefix(namespace)
            elif written.islower() or _is_all_ours(conf, settings):
                found[written] = name.removeprefix("celery_")
    return found


def _is_all_ours(conf: Any, settings: object) -> bool:
    """Whether everything in one of the maps of a configuration is for Celery. With a namespace,
    Celery reads of its configuration object, which can be all of Django's settings, what begins
    with that, and names in lower case."""
    return not conf.prefix or settings is conf.maps[0]


def _get(conf: Any, name: str, default: Any = _UNSET) -> Any:
    """One of our settings, in any spelling. A value set on the app precedes its config object.

    `conf.get` will not do: it does not know the old upper-case spellings of a setting that is not
    Celery's, and in Celery 5.4 a name with the namespace precedes a value set on the app. Nor will
    `plain_names`: a configuration object that computes its settings tells no names.
    """
    prefixed = f"{conf.prefix or ''}{name}"
    everywhere = (name, prefixed, prefixed.upper())
    on_the_app = (*everywhere, name.upper(), f"celery_{name}", f"CELERY_{name.upper()}")
    for settings in conf.maps:
        for spelling in on_the_app if _is_all_ours(conf, settings) else everywhere:
            try:
                return settings[spelling]
            except KeyError:
                continue
    return default


def _text(conf: Any, name: str) -> str | None:
    value = _get(conf, name, None)
    if value is None or isinstance(value, str):
        return value
    raise LockConfigError(f"settings: {name} must be text, not {type(value).__qualname__}")


def _own_url(conf: Any) -> str | None:
    own = _text(conf, "relock_url")
    if own is None:
        return None
    if urls := _urls(own):
        return urls[0]
    raise LockConfigError(
        "settings: relock_url is empty, as when an environment variable is missing. Set the "
        "URL of a Redis, or leave it out (None) for the result backend or the broker."
    )


def _old_backend(conf: Any) -> str:
    """The URL that `result_backend = "redis"` stands for, from redis_host, redis_port and so on."""
    host, port = conf.get("redis_host") or "localhost", conf.get("redis_port") or 6379
    return f"redis://{host}:{port}/{conf.get('redis_db') or 0}"


def _login(conf: Any) -> dict[str, Any]:
    return {name: value for name, written in _LOGIN.items() if (value := conf.get(written))}


def _urls(value: Any) -> list[str]:
    """The URLs in a setting: one, or several for failover. Locks live on the first Redis only: on
    two servers, two executions could acquire one lock."""
    if isinstance(value, str):
        found = [url for url in _NEXT_URL.split(value) if url]
    elif isinstance(value, Iterable):
        found = [url for part in value if isinstance(part, str) for url in _urls(part)]
    else:
        return []
    # Several Sentinel URLs together name one Redis.
    sentinels = list(dict.fromkeys(url for url in found if url.lower().startswith("sentinel://")))
    one = ";".join(sentinels)
    return [one if url in sentinels else url for url in found if url not in sentinels[1:]]


def _is_redis(url: str) -> bool:
    scheme, found, _ = url.partition("://")
    return bool(found) and scheme.lower() in _REDIS


def _refuse_options_of_a_url(conf: Any, because: str) -> None:
    """Refuse what belongs to the text of `relock_url` and would be ignored here."""
    for name in ("relock_use_ssl", "relock_transport_options"):
        if _get(conf, name, None):
            raise LockConfigError(
                f"settings: {name} is never used: {because}. Set relock_url to the URL of a Redis, "
                f"or leave {name} out."
            )


def _own_ssl(conf: Any, url: str) -> Any:
    own = _get(conf, "relock_use_ssl")
    if own is not _UNSET:
        return own or None
    is_tls = url.lower().startswith(("rediss://", "rediss+cluster://"))
    return (conf.get("redis_backend_use_ssl") or None) if is_tls else None


def _own_transport(conf: Any, url: str) -> Mapping[str, Any] | None:
    own = _get(conf, "relock_transport_options", None)
    if own is None:
        return None
    if not isinstance(own, Mapping):
        kind = type(own).__qualname__
        raise LockConfigError(f"settings: relock_transport_options must be a dict, not {kind}")
    scheme = url.strip().partition("://")[0].lower()
    read = _read_by(scheme)
    for name, value in own.items():
        if name not in _OWN_TRANSPORT:
            raise LockConfigError(
                f"settings: relock_transport_options has no option {name!r}. There are "
                + ", ".join(_OWN_TRANSPORT)
            )
        if name not in read and value is not None:
            raise LockConfigError(
                f"settings: relock_transport_options: {name} is never used: relock_url begins with "
                f"{scheme}://. Sentinels (sentinel://) read all of these options, a cluster "
                "(redis+cluster://) reads patience. Leave the others out."
            )
    return own


def _read_by(scheme: str) -> tuple[str, ...]:
    """The transport options that a URL reads, or ignores because it is for tests."""
    if scheme in ("sentinel", "memory"):
        return _OWN_TRANSPORT
    return ("patience",) if scheme.endswith("+cluster") else ()


def visibility_timeout(conf: Any) -> float:
    """Seconds after which the app's broker delivers a message again that was not acknowledged, if
    it goes by the clock. An hour by default, as kombu has it for Redis."""
    given = (conf.get("broker_transport_options") or {}).get("visibility_timeout")
    return float(given) if isinstance(given, int | float) else 3600.0


def _beside_the_url(conf: Any) -> dict[str, Any]:
    """What does not depend on where the locks live."""
    of = BackendSettings._field_defaults
    (replicas, within), (messages, size) = of["replicas"], of["most_parked"]
    seconds, some = (above_zero, SECONDS_ABOVE_0), (count, "a whole number from 1")
    remember = visibility_timeout(conf) + _LATE
    return {
        "namespace": _namespace(conf),
        "replicas": (
            _checked(conf, "min_replicas", replicas, _from_zero, "how many replicas, 0 for none"),
            _checked(conf, "min_replicas_timeout", within, *seconds),
        ),
        "remember": _checked(conf, "remember", remember, *seconds),
        "most_parked": (
            _checked(conf, "max_parked_messages", messages, *some),
            _checked(conf, "max_parked_bytes", size, *some),
        ),
    }


def _checked(conf: Any, name: str, default: Any, check: Check, allowed: str) -> Any:
    value = _get(conf, _PREFIX + name, default)
    try:
        return value if value is default else check(value)
    except ValueError:
        raise LockConfigError(
            f"settings: relock_{name}={value!r:.100} cannot be used. Use {allowed}."
        ) from None


_from_zero = that(lambda value: type(value) is int and value >= 0)
