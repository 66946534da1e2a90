"""From a URL or a client of redis-py to the nodes of a cluster, and how to connect to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from redis.cluster import RedisCluster

from ..errors import LockConfigError
from .clients import options_of
from .nodes import FAILOVER
from .pools import pool_from_url
from .topology import Node, Remap
from .urls import safe_url

_SCHEME = re.compile(
    r"(?P<scheme>rediss?)\+cluster://(?P<login>[^/?#]*@)?(?P<nodes>[^/?#]+)(?P<rest>.*)"
)
_EXAMPLE = "redis+cluster://user:password@node1:6379,node2:6379"
# What belongs to one node, or to redis-py's own way about a cluster.
_ADDRESS = ("host", "port", "db", "path", "redis_connect_func", "parser_class", "cache")


class Seeds(NamedTuple):
    """Where a cluster is: some of its nodes, connection options without an address, and from a
    node's address in the cluster to the one that it has from here; how long one is waited for."""

    nodes: tuple[Node, ...]
    options: Mapping[str, Any]
    remap: Remap | None = None
    failover: float = FAILOVER


def is_cluster_url(url: str) -> bool:
    return url.strip().lower().startswith(("redis+cluster://", "rediss+cluster://"))


def seeds_of_url(
    url: str,
    ssl: Mapping[str, Any] | bool | None = None,
    transport: Mapping[str, Any] | None = None,
) -> Seeds:
    """The cluster of a URL: `redis+cluster://` or, with TLS, `rediss+cluster://`, its nodes with
    commas between, and the options that a URL of a single Redis has. `patience`, there or in the
    transport options, is for how many seconds a failover is waited for.

    Raises:
        LockConfigError: the URL or a TLS option cannot be used. The message has no password.
    """
    found = _SCHEME.fullmatch(url.strip())
    if found is None:
        raise LockConfigError(f"{safe_url(url)} is not the URL of a cluster, such as {_EXAMPLE}")
    start = f"{found['scheme']}://{found['login'] or ''}"
    nodes, options = [], {}
    for place in found["nodes"].split(","):
        options = options_of(pool_from_url(f"{start}{place}{found['rest']}", ssl))
        nodes.append(Node(options["host"], options["port"]))
    if options["db"]:
        raise LockConfigError(f"{safe_url(url)}: a cluster has the database 0 alone: leave it out")
    return Seeds(tuple(nodes), _without_address(options), None, _patience(url, transport))


def seeds_of_client(client: RedisCluster) -> Seeds:
    """The cluster of a client."""
    manager = client.nodes_manager
    nodes: list[Any] = client.get_nodes()  # type: ignore[no-untyped-call]
    known = {Node(node.host, int(node.port)) for node in nodes}
    connection = client.get_redis_connection(nodes[0])
    options = options_of(connection.connection_pool)
    return Seeds(tuple(sorted(known)), _without_address(options), manager.address_remap)


def _patience(url: str, transport: Mapping[str, Any] | None) -> float:
    query = dict(parse_qsl(url.partition("?")[2]))
    given = query.get("patience", (transport or {}).get("patience", FAILOVER))
    try:
        if (seconds := float(given)) >= 0:
            return seconds
    except (TypeError, ValueError):
        pass
    raise LockConfigError(f"{safe_url(url)}: patience={given!r} is no number of seconds from 0 on")


def _without_address(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _ADDRESS}
