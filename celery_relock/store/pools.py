"""Connection pools from URLs, as redis-py and as Celery spell them.

The URL is taken apart here and not by redis-py: Celery writes `redis+socket://`, `virtual_host` and
`CERT_REQUIRED`, which redis-py does not know, and redis-py 5 unquotes a query twice, 8 once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..errors import LockConfigError
from .sentinel import FOUND_BY, by_sentinels
from .urls import SENTINEL, SOCKETS, host_of, parts_of, safe_url, split

_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")


def pool_from_url(
    url: str,
    ssl: Mapping[str, Any] | bool | None = None,
    transport: Mapping[str, Any] | None = None,
    **options: Any,
) -> redis.ConnectionPool:
    """A pool for a Redis URL. It connects when it is first used.

    Args:
        url: `redis://`, `rediss://` (TLS), `unix:///path`, Celery's `redis+socket:///path`, or
            `sentinel://` for each Sentinel, with `;` between. Of the query, what only Celery or a
            redis-py client needs is passed over.
        ssl: as in Celery's `broker_use_ssl`: options whose names start with `ssl_`, or True.
        transport: for Sentinels, as in Celery's transport options: `master_name`,
            `sentinel_kwargs`, `min_other_sentinels`; and `patience`, the seconds for which a
            failover is waited for.
        options: for redis-py's connections; they win over the URL.

    Raises:
        LockConfigError: the URL or a TLS option cannot be used. The message has no password.
    """
    kwargs: dict[str, Any] = {
        "socket_timeout": 5.0,
        "socket_connect_timeout": 2.0,
        "client_name": "celery-relock",
        # The same in every version of redis-py, and no HELLO, which some proxies do not know.
        "protocol": 2,
        # The store repeats commands by itself, within a bound that it knows.
        "retry": Retry(NoBackoff(), 0),
        "max_connections": 2**31,
    }
    if url.strip().lower().startswith(SENTINEL):
        return redis.ConnectionPool(**(kwargs | _by_sentinels(url, ssl, transport or {}) | options))
    return redis.ConnectionPool(**(kwargs | _from_url(url, ssl) | options))


def _from_url(url: str, ssl: Mapping[str, Any] | bool | None) -> dict[str, Any]:
    parts, query = split(url)
    shown = safe_url(url)
    options: dict[str, Any] = {
        name: query.pop(name) for name in list(query) if name.startswith("ssl_")
    }
    options |= _as_options(ssl, shown)
    kwargs = _converted(query, shown)
    if "credential_provider" not in kwargs:
        kwargs |= _login(parts, query)
    if parts.scheme in SOCKETS:
        if ssl or options:
            raise LockConfigError(f"{shown}: a unix socket has no TLS, so drop the TLS options")
        kwargs.pop("socket_keepalive", None)
        return kwargs | _socket(parts, query, shown)
    port = parts.port or (26379 if parts.scheme == "sentinel" else 6379)
    kwargs |= {"host": parts.hostname or "localhost", "port": port}
    kwargs["db"] = _database(query, parts.path.strip("/"), shown)
    if parts.scheme == "rediss" or ssl or (options and parts.scheme == "sentinel"):
        return kwargs | _tls(options, shown)
    if options:
        raise LockConfigError(f"{shown} has TLS options, so it must begin with rediss://")
    return kwargs | {"connection_class": redis.Connection}


def _by_sentinels(
    url: str, ssl: Mapping[str, Any] | bool | None, transport: Mapping[str, Any]
) -> dict[str, Any]:
    """As in Celery: login, database and options are those of the first URL, and the login is the
    master's; `sentinel_kwargs` has one for the Sentinels."""
    shown, parts = safe_url(url), parts_of(url)
    if any(";" in host or "," in host for host in map(host_of, parts)):
        raise LockConfigError(f"{shown}: write {SENTINEL} before each Sentinel, with ; between")
    kwargs, *others = [_from_url(part, ssl) for part in parts]
    if any(other["db"] not in (0, kwargs["db"]) for other in others):
        raise LockConfigError(
            f"{shown}: Celery reads the database behind the first Sentinel alone: write it there"
        )
    hosts = [(part["host"], part["port"]) for part in (kwargs, *others)]
    every = [pair for part in parts for pair in split(part)[1].items()]
    query = {name: text for name, text in every if name in FOUND_BY}
    del kwargs["host"], kwargs["port"]
    # A master that is silent is found out by nothing else, and there may be another one soon.
    brief = {"socket_timeout": 2.0}
    return brief | kwargs | by_sentinels(hosts, {**transport, **query}, kwargs, shown)


def _login(parts: SplitResult, query: Mapping[str, str]) -> dict[str, Any]:
    found = {
        "username": unquote(parts.username or "") or query.get("username"),
        "password": unquote(parts.password or "") or query.get("password"),
    }
    return {name: value for name, value in found.items() if value}


def _socket(parts: SplitResult, query: Mapping[str, str], shown: str) -> dict[str, Any]:
    if parts.hostname or not parts.path.strip("/"):
        raise LockConfigError(
            f"{shown} names no socket. Its path begins with a third slash: unix:///run/redis.sock"
        )
    return {
        "connection_class": redis.UnixDomainSocketConnection,
        "path": unquote(parts.path),
        "db": _database(query, "", shown),
    }


def _database(query: Mapping[str, str], path: str, shown: str) -> int:
    text = (query.get("db") or unquote(path) or query.get("virtual_host") or "0").strip("/")
    if not text.isdecimal():
        raise LockConfigError(f"{shown}: the database, behind the slash, must be a number")
    return int(text)


def _switch(text: str | bool) -> bool:
    if isinstance(text, bool):
        return text
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _provider(dotted: str) -> Any:
    """An object that asks for credentials at each connection; Celery names its class in the URL."""
    module, _, name = dotted.replace(":", ".").rpartition(".")
    return getattr(import_module(module), name)()


_QUERY: dict[str, Callable[[str], Any]] = {
    "socket_timeout": float,
    "socket_connect_timeout": float,
    "socket_keepalive": _switch,
    "health_check_interval": float,
    "client_name": str,
    "protocol": int,
    "credential_provider": _provider,
    "ssl_check_hostname": _switch,
}


def _converted(query: Mapping[str, Any], shown: str) -> dict[str, Any]:
    found = {}
    for name in _QUERY.keys() & query.keys():
        try:
            found[name] = _QUERY[name](query[name])
        except (ValueError, ImportError, AttributeError) as error:
            raise LockConfigError(f"{shown}: {name}={query[name]!r} cannot be used") from error
    return found


def _as_options(ssl: Mapping[str, Any] | bool | None, shown: str) -> Mapping[str, Any]:
    if isinstance(ssl, Mapping):
        return ssl
    if ssl is None or isinstance(ssl, bool):
        return {}
    raise LockConfigError(f"{shown}: TLS options are a dict or True, not {type(ssl).__qualname__}")


def _tls(given: Mapping[str, Any], shown: str) -> dict[str, Any]:
    known = [n for n in inspect.signature(redis.SSLConnection).parameters if n.startswith("ssl_")]
    options = dict(given)
    for name, value in options.items():
        if name not in known:
            raise LockConfigError(f"{shown}: no TLS option {name!r}. There are {', '.join(known)}")
        # Else it would look as if the server were away.
        if name in _FILES and value and not Path(value).exists():
            raise LockConfigError(f"{shown}: {name}={value!r}: there is no such file")
    checks = options["ssl_cert_reqs"] = _verification(options.get("ssl_cert_reqs", "required"))
    options |= _converted(options, shown)
    if checks == "none":
        # Python refuses to compare the name in a certificate that it does not look at.
        options["ssl_check_hostname"] = False
    return {"connection_class": redis.SSLConnection, **options}


def _verification(value: Any) -> str:
    """Celery's and redis-py's ways to say how the server's certificate is checked, as one."""
    if value is None:
        return "none"
    text = value if isinstance(value, str) else getattr(value, "name", repr(value))
    word = text.lower().removeprefix("cert_")
    if word not in ("required", "optional", "none"):
        raise LockConfigError(
            f"ssl_cert_reqs={value!r} cannot be used. It takes 'required', 'optional' or 'none'"
        )
    return word
