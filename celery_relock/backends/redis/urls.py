"""From what a user writes, a URL or a client of redis-py, to connections of our own.

Celery's spellings are accepted: `redis+socket://`, `virtual_host`, `CERT_REQUIRED`, a list of
`sentinel://`. URLs are parsed by the standard library: redis-py's parser accepts mistakes (`/abc`
is database 0, port 0 the default port) and unquotes a query twice before version 8.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import signature
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import redis
import redis.cluster
from redis import CredentialProvider
from redis.asyncio.cluster import RedisCluster as AsyncCluster
from redis.backoff import NoBackoff
from redis.connection import URL_QUERY_ARGUMENT_PARSERS
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from ...engine import ids
from ...engine.interrupt import is_thrown_in
from ...engine.protocol import LONGEST
from ...errors import LockConfigError
from .cluster import FAILOVER, Cluster, Node, Remap
from .connections import NONE, Connections, Replicas, SingleServer, Transport
from .errors import FAULTS, ProviderFailed
from .sentinel import Finder, ToMaster, Watched
from .tls import check_tls

_Made = TypeVar("_Made", bound=Transport)

# redis-py reads the first in a URL as text before 8.
_PARSERS: Mapping[str, Any] = {"ssl_min_version": int, **URL_QUERY_ARGUMENT_PARSERS}

_SOCKETS = ("unix", "socket", "redis+socket")
_SCHEMES = ("redis", "rediss", "sentinel", "redis+cluster", "rediss+cluster", *_SOCKETS)
_EXAMPLE = "It looks like redis://:password@localhost:6379/0"
# Where the next URL of a failover list begins: a password can contain a semicolon.
_NEXT_URL = re.compile(r";(?=[\w+.-]+://)")
# Also what follows an unescaped & or # in it.
_SECRETS = re.compile(
    r"([?&](?:[^=&#]*pass[^=&#]*|sentinel_kwargs)=)[^&]*(?:&(?![^&=]+=)[^&]*)*", re.IGNORECASE
)
# The options that we use besides `ssl_…`: from a client (and each `socket_…`), and from a URL.
_TAKEN = {"host", "port", "path", "db", "client_name"}
_TAKEN |= {"username", "password", "credential_provider"}
_TIMEOUTS = {"socket_timeout": 5.0, "socket_connect_timeout": 2.0}
_IN_URLS = {*_TIMEOUTS, "socket_keepalive", "client_name", "credential_provider"}


def transport_for_url(
    url: str,
    ssl: Mapping[str, Any] | bool | None = None,
    transport: Mapping[str, Any] | None = None,
    replicas: Replicas = NONE,
) -> Transport:
    """The way to the Redis of a URL. It connects when it is first used.

    Args:
        url: `redis://`, `rediss://` (TLS), `unix:///path`, Celery's `redis+socket:///path`,
            `redis+cluster://` or `rediss+cluster://` with nodes separated by commas, or a
            `sentinel://` for each Sentinel, separated by `;`. Options of the query that only Celery
            or a redis-py client needs are ignored.
        ssl: as Celery's `broker_use_ssl`: options whose names start with `ssl_`, or True.
        transport: for Sentinels, as in Celery's transport options: `master_name`,
            `sentinel_kwargs`, `min_other_sentinels`; and, also for a cluster, `patience`: for how
            many seconds to wait for a failover. `login`: options for those that the URL lacks, of
            `username`, `password` and `credential_provider`.
        replicas: how many replicas must have a hold before it is valid.

    Raises:
        LockConfigError: the URL or an option cannot be used. The message has no password.
    """
    shown, first = safe_url(url), _NEXT_URL.split(url.strip())[0]
    scheme = first.partition("://")[0].lower()
    if scheme not in _SCHEMES:
        what = f"{shown} is not the URL of a Redis" if shown else "the URL of the Redis is empty"
        raise LockConfigError(f"{what}. {_EXAMPLE}")
    given = dict(transport or {})
    if scheme == "sentinel":
        return _of_sentinels(url, ssl, given, shown, replicas)
    if "+cluster" in scheme:
        return _of_cluster(url, ssl, given, shown, replicas)
    return _server(_options(url, ssl, shown, given.get("login")), replicas)


def transport_for_client(
    client: redis.Redis | redis.cluster.RedisCluster | redis.asyncio.Redis | AsyncCluster,
    replicas: Replicas = NONE,
) -> Transport:
    """The way to the Redis of a client: with its address, credentials and options, over connections
    of our own.

    Raises:
        LockConfigError: the client leads to replicas, or has its own class of connections.
    """
    if isinstance(client, redis.cluster.RedisCluster | AsyncCluster):
        nodes: Any = client.get_nodes() or [*client.nodes_manager.startup_nodes.values()]
        seeds = sorted({Node(node.host, int(node.port)) for node in nodes})
        node: Any = nodes[0]  # for coroutines it is its own pool
        if isinstance(client, redis.cluster.RedisCluster):
            node = client.get_redis_connection(node).connection_pool
        return _cluster(seeds, of_pool(node), replicas, client.nodes_manager.address_remap)
    if isinstance(client.connection_pool, SentinelConnectionPool):
        return _of_pool_of_sentinels(client.connection_pool, replicas)
    return _server(of_pool(client.connection_pool), replicas)


def _kind_for_threads(kind: type[Any]) -> type[Any]:
    """A class of connections, or the one for threads that matches one for coroutines."""
    if issubclass(kind, redis.connection.AbstractConnection):
        return kind
    for threads in (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection):
        if kind is getattr(redis.asyncio.connection, threads.__name__):
            return threads
    raise LockConfigError(
        f"a lock cannot use connections of the class {kind.__qualname__}: give the URL of the Redis"
    )


def of_pool(pool: Any) -> dict[str, Any]:
    """How a pool reaches its server: class of connection, address, credentials, options."""
    found = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name in _TAKEN or name.startswith(("socket_", "ssl_"))
    }
    for name in found.keys() & {"host", "path"}:
        if isinstance(found[name], bytes):  # a socket takes them, and it is the same address
            found[name] = os.fsdecode(found[name])
    for name, seconds in _TIMEOUTS.items():
        if found.get(name) is None:
            found[name] = seconds  # a client can wait for ever, a lock must not
    return {**found, "connection_class": _kind_for_threads(pool.connection_class)}


def safe_url(url: str) -> str:
    """The URL for errors and logs, with its passwords masked even if it is not well formed."""
    return ";".join(_masked(part) for part in _NEXT_URL.split(_SECRETS.sub(r"\1***", url)))


def _masked(url: str) -> str:
    scheme, found, rest = url.partition("://")
    before, rest = (scheme + found, rest) if found else ("", url)
    # Up to the last @: an unescaped password can contain any character.
    login, at, host = rest.rpartition("@")
    if at:
        name, colon, _ = login.partition(":")
        return f"{before}{name + colon if colon else ''}***@{host}"
    hosts = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if not all(re.fullmatch(r"(\[.*\]|[^:]*)(:\d*)?", each) for each in hosts.split(",")):
        return f"{before}{hosts.partition(':')[0]}:***"  # no port: a password without its @
    return url


def _server(options: dict[str, Any], replicas: Replicas) -> Transport:
    kind, kwargs = _kind(options)
    host = kwargs.get("host") or "localhost"
    where = kwargs.get("path") or ("127.0.0.1" if host == "localhost" else host)
    address = where, str(kwargs.get("port") or 6379), str(kwargs["db"])
    lists = Connections(kind, kwargs, replicas), Connections(kind, kwargs, replicas, limit=1.0)
    return _known(SingleServer(*lists, address), options)


def _watched(
    options: dict[str, Any],
    service: str,
    manager: Sentinel,
    replicas: Replicas,
    patience: float | None = None,
) -> Watched:
    """The way to the master that the Sentinels of a manager name, over connections of our own."""
    ways = {}
    try:
        for client in manager.sentinels:
            way = kind, kwargs = _kind(of_pool(client.connection_pool))
            kind(**kwargs)  # which refuses a password beside a provider, say
            ways[kwargs.get("host", "localhost"), kwargs.get("port", 26379)] = way
    except (LockConfigError, redis.RedisError) as error:
        raise LockConfigError(f"sentinel_kwargs: {getattr(error, 'reason', error)}") from error
    own = manager if type(manager).discover_master is not Sentinel.discover_master else None
    least = manager.min_other_sentinels
    finder = Finder(service, ways, least, patience, own)
    asked = service, finder.hosts, sorted(manager.sentinel_kwargs.items(), key=repr), least
    kind, kwargs = _kind(options)
    hosts = sorted(("127.0.0.1" if h == "localhost" else h, str(port)) for h, port in finder.hosts)
    address = finder.service, *hosts, str(kwargs["db"])
    work = ToMaster(finder, kind, kwargs, replicas)
    renewals = ToMaster(finder, kind, kwargs, replicas, limit=1.0)
    return _known(Watched(finder, work, renewals, address), options, asked, patience, type(own))


def _cluster(
    seeds: Sequence[Node],
    options: dict[str, Any],
    replicas: Replicas,
    remap: Remap | None,
    failover: float = FAILOVER,
) -> Cluster:
    kind, kwargs = _kind({**options, "db": 0})
    for name in ("host", "port", "path"):
        kwargs.pop(name, None)
    # MOVED and ASK must be errors of their own. Before redis-py 6 only this parser makes them so;
    # redis-py 8 no longer has it.
    if parser := getattr(redis.cluster, "ClusterParser", None):
        kwargs["parser_class"] = parser
    made = Cluster(seeds, kind, kwargs, remap, replicas, failover)
    return _known(made, options, remap, failover)


def _known(made: _Made, options: Mapping[str, Any], *more: Any) -> _Made:
    """Set the fingerprint of a transport, a digest that reveals no password."""
    given = sorted(options.items(), key=repr)
    parts = type(made), sorted(made.addresses), made.replicas, given, more
    made.fingerprint = ids.digest(repr(parts).encode())
    return made


def _kind(options: Mapping[str, Any]) -> tuple[type[Any], dict[str, Any]]:
    """redis-py's class of connection, and its keywords: without retries of its own, and with
    protocol 2, which is the same in every version and needs no HELLO, which some proxies lack."""
    kwargs = {**options, "protocol": 2, "retry": Retry(NoBackoff(), 0), "encoding": "utf-8"}
    kind = kwargs.pop("connection_class")
    for name in _TIMEOUTS:
        seconds = kwargs[name]
        if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST:
            raise LockConfigError(f"{name}={seconds!r} cannot be used: use seconds above 0")
    if issubclass(kind, redis.SSLConnection):
        check_tls(options)
    # No CLIENT SETINFO: it takes two round trips, redis-py 8 reads its version from a file for each
    # connection, and in redis-py 5.0 the error of an older Redis keeps the caller's frames alive,
    # with a `Lock` that was dropped, until the garbage collector comes.
    names = ("driver_info",) if hasattr(redis, "DriverInfo") else ("lib_name", "lib_version")
    kwargs |= dict.fromkeys(names)
    kwargs["db"] = str(options["db"]) if options.get("db") else 0  # 0 is not sent
    provider = kwargs.get("credential_provider")
    if provider and not isinstance(provider, _Provider):  # that of a client
        kwargs["credential_provider"] = _Provider(lambda: provider)
    return kind, kwargs


def _of_sentinels(
    url: str, ssl: Any, given: dict[str, Any], shown: str, replicas: Replicas
) -> Watched:
    """The way to the master of Sentinel URLs. As in Celery, the first URL has the login, the
    database and the options, and the login is the master's: `sentinel_kwargs` has that of the
    Sentinels."""
    parts = _NEXT_URL.split(url.strip().rstrip(";"))
    if any(";" in _hosts(part) or "," in _hosts(part) for part in parts):
        raise LockConfigError(f"{shown}: write sentinel:// before each Sentinel, with ; between")
    options, *others = [_options(part, ssl, shown, given.get("login")) for part in parts]
    if any(other["db"] not in (0, options["db"]) for other in others):
        raise LockConfigError(
            f"{shown}: Celery reads the database from the first Sentinel's URL alone: write it "
            "there"
        )
    hosts = [(each.pop("host"), each.pop("port")) for each in (options, *others)]
    for part in parts:
        given |= dict(parse_qsl(urlsplit(part).query))
    service, login = given.get("master_name"), given.get("sentinel_kwargs") or {}
    if not service or not isinstance(service, str):
        raise LockConfigError(
            f"{shown} needs the Sentinels' name for the master: append ?master_name=…, or set "
            "relock_transport_options = {'master_name': …}. If this is the URL of the broker or "
            "the result backend, set the name in their transport options"
        )
    if not isinstance(login, Mapping):
        raise LockConfigError(
            f"{shown}: sentinel_kwargs must be a dict, not {type(login).__name__}"
        )
    least = _number(given, "min_other_sentinels", 0, shown, int)
    try:
        manager = Sentinel(hosts, least, login)  # type: ignore[no-untyped-call]
    except (TypeError, ValueError) as error:
        raise LockConfigError(f"sentinel_kwargs cannot be used: {error}") from error
    # Only a timeout reveals a silent master, and a failover can soon bring another master.
    if "socket_timeout=" not in parts[0]:
        options["socket_timeout"] = 2.0
    return _watched(options, service, manager, replicas, _number(given, "patience", None, shown))


def _of_pool_of_sentinels(pool: SentinelConnectionPool, replicas: Replicas) -> Watched:
    if not pool.is_master:
        raise LockConfigError(
            f"the client for {pool.service_name!r} leads to replicas, which accept no writes: "
            "create the client with Sentinel.master_for"
        )
    options = of_pool(pool)
    secure = issubclass(pool.connection_class, redis.SSLConnection)
    options["connection_class"] = redis.SSLConnection if secure else redis.Connection
    return _watched(options, pool.service_name, pool.sentinel_manager, replicas)


def _of_cluster(
    url: str, ssl: Any, given: dict[str, Any], shown: str, replicas: Replicas
) -> Cluster:
    scheme, _, rest = url.strip().partition("://")
    hosts = _hosts(url.strip())
    if not hosts or "://" in rest:
        raise LockConfigError(
            f"{shown} is not the URL of a cluster, such as "
            "redis+cluster://user:password@node1:6379,node2:6379"
        )
    secure = scheme.lower().partition("+")[0]
    login, at, there = rest.rpartition("@")
    seeds, options = [], {}
    for each in hosts.split(","):
        options = _options(f"{secure}://{login}{at}{each}{there[len(hosts) :]}", ssl, shown)
        seeds.append(Node(options["host"], options["port"]))
    if options["db"]:
        raise LockConfigError(f"{shown}: a cluster has only database 0. Leave the number out")
    given |= dict(parse_qsl(urlsplit(url).query))
    return _cluster(seeds, options, replicas, None, _number(given, "patience", FAILOVER, shown))


def _options(
    url: str, ssl: Any, shown: str, login: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """redis-py's options for one URL, with its class of connection."""
    try:
        parts = urlsplit(url.strip())
        query = dict(login or {})
        query |= parse_qsl(parts.query, strict_parsing=bool(parts.query))
        (parts.hostname or "").encode("idna")  # as a connection does
        # An @ in the path: it is the rest of a password with a slash.
        is_rest = parts.scheme not in _SOCKETS and "@" in parts.path
        if parts.port == 0 or parts.fragment or is_rest or ";" in (parts.hostname or ""):
            raise ValueError
    except ValueError:  # whose text can quote the password
        raise LockConfigError(
            f"{shown} is not a URL. {_EXAMPLE}; in a password, write @ as %40, / as %2F, "
            "? as %3F, # as %23, % as %25"
        ) from None
    found: dict[str, Any] = {**_TIMEOUTS, "client_name": "celery-relock"}
    own = {"username": unquote(parts.username or ""), "password": unquote(parts.password or "")}
    found |= {name: value or query.get(name) for name, value in own.items()}
    given = _converted(query, shown)
    found |= {name: value for name, value in given.items() if name in _IN_URLS}
    if "credential_provider" in found:
        del found["username"], found["password"]
    secure = _tls(given, ssl, parts.scheme, shown)
    if parts.scheme in _SOCKETS:
        if parts.hostname or not parts.path.strip("/"):
            raise LockConfigError(
                f"{shown} names no socket. The path begins with the third slash: "
                "unix:///run/redis.sock"
            )
        found.pop("socket_keepalive", None)
        kind = redis.UnixDomainSocketConnection
        return {**found, "connection_class": kind, "path": unquote(parts.path),
                "db": _database(query, "", shown)}  # fmt: skip
    found["host"] = parts.hostname or "localhost"
    found["port"] = parts.port or (26379 if parts.scheme == "sentinel" else 6379)
    found["db"] = _database(query, parts.path.strip("/"), shown)
    if secure is None:
        return {**found, "connection_class": redis.Connection}
    return {**found, "connection_class": redis.SSLConnection, **secure}


def _database(query: Mapping[str, str], path: str, shown: str) -> int:
    text = (query.get("db") or unquote(path) or query.get("virtual_host") or "0").strip("/")
    if not text.isdecimal():
        raise LockConfigError(f"{shown}: the database, after the slash, must be a number")
    return int(text)


def _converted(query: Mapping[str, Any], shown: str) -> dict[str, Any]:
    """The options of a connection and of TLS in a query, as redis-py reads them."""
    found: dict[str, Any] = {}
    for name, text in query.items():
        if name in _IN_URLS or name.startswith("ssl_"):
            read = _provider if name == "credential_provider" else _PARSERS.get(name, str)
            try:
                found[name] = read(text)
            except (ValueError, TypeError, ImportError, AttributeError) as error:
                raise LockConfigError(f"{shown}: {name}={text!r} cannot be used") from error
        else:
            _refuse_mistaken(name, shown)
    return found


def _refuse_mistaken(name: str, shown: str) -> None:
    if name == "ssl":  # ignored, it would connect without TLS
        raise LockConfigError(f"{shown} has no option ssl: rediss:// asks for TLS")
    from difflib import get_close_matches  # only for those who mistype

    close = get_close_matches(name, _IN_URLS, 1, cutoff=0.85)
    if close:
        raise LockConfigError(f"{shown} has no option {name}. Did you mean {close[0]}?")


def _provider(dotted: Any) -> Any:
    """An object that provides credentials for each connection. Celery's URLs name its class."""
    if not isinstance(dotted, str):
        return dotted
    module, _, name = dotted.replace(":", ".").rpartition(".")
    return _Provider(getattr(import_module(module), name))


class _Provider(CredentialProvider):
    """A provider of credentials, made when it is first asked: what it asks itself may be away. Then
    Redis cannot be reached."""

    def __init__(self, make: Callable[[], CredentialProvider]) -> None:
        self._make = make
        self._made: CredentialProvider | None = None

    def get_credentials(self) -> Any:
        try:
            if self._made is None:
                self._made = self._make()
            return self._made.get_credentials()
        except Exception as error:
            if is_thrown_in(error) or isinstance(error, FAULTS):
                raise
            if isinstance(error, NotImplementedError):  # as of redis-py's base class
                raise LockConfigError(
                    "the credential provider has no get_credentials: connections are opened in "
                    "threads, also for coroutines, so get_credentials_async alone is not enough"
                ) from error
            raise ProviderFailed(f"the credential provider failed: {error!r}") from error


def _tls(
    given: Mapping[str, Any], ssl: Mapping[str, Any] | bool | None, scheme: str, shown: str
) -> dict[str, Any] | None:
    """The options of TLS, from the URL and from the app; None without TLS."""
    if ssl is not None and not isinstance(ssl, Mapping | bool):
        raise LockConfigError(
            f"{shown}: TLS options must be a dict or True, not {type(ssl).__qualname__}"
        )
    options = {name: value for name, value in given.items() if name.startswith("ssl_")}
    options |= ssl if isinstance(ssl, Mapping) else {}
    if not (options or ssl or scheme == "rediss"):
        return None
    if scheme in _SOCKETS:
        raise LockConfigError(f"{shown}: a unix socket has no TLS. Remove the TLS options")
    if not (ssl or scheme in ("rediss", "sentinel")):
        raise LockConfigError(f"{shown} has TLS options, so it must begin with rediss://")
    _check_names(options, shown)
    # Celery and redis-py spell the check of the server's certificate in different ways.
    wanted = options.get("ssl_cert_reqs", "required")
    text = "none" if wanted is None else str(getattr(wanted, "name", wanted))
    checks = options["ssl_cert_reqs"] = text.lower().removeprefix("cert_")
    if checks not in ("required", "optional", "none"):
        raise LockConfigError(
            f"{shown}: ssl_cert_reqs={wanted!r} cannot be used. It takes 'required', 'optional' or "
            "'none'"
        )
    if checks == "none":
        # Python refuses to check the name in a certificate that is not verified.
        options["ssl_check_hostname"] = False
    options.setdefault("ssl_check_hostname", True)  # redis-py 5 would not check it
    return options


def _check_names(options: Mapping[str, Any], shown: str) -> None:
    known = [n for n in signature(redis.SSLConnection).parameters if n.startswith("ssl_")]
    for name in options:
        if name not in known:
            raise LockConfigError(f"{shown}: no TLS option {name!r}. There are {', '.join(known)}")
    if options.get("ssl_keyfile") and not options.get("ssl_certfile"):
        raise LockConfigError(f"{shown}: ssl_keyfile needs its ssl_certfile")


def _hosts(url: str) -> str:
    """Host and port of a URL, even if they are not well formed."""
    return re.split("[/?#]", url.partition("://")[2].rpartition("@")[2], maxsplit=1)[0]


def _number(
    given: Mapping[str, Any],
    name: str,
    default: float | None,
    shown: str,
    kind: Callable[[float], Any] = float,
) -> Any:
    value = given.get(name)
    if value is None:
        return default
    try:
        if 0 <= (number := float(value)) <= LONGEST:
            return kind(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise LockConfigError(
        f"{shown}: {name}={value!r} cannot be used. patience (seconds) and min_other_sentinels "
        "must be numbers from 0"
    )
