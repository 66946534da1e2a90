"""URLs of Redis taken apart, and shown without their passwords."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ..errors import LockConfigError

SOCKETS = ("unix", "socket", "redis+socket")
SENTINEL = "sentinel://"
_EXAMPLE = "It looks like redis://:password@localhost:6379/0"
# The next URL of a failover list; a password may have a semicolon of its own.
_NEXT_URL = re.compile(r";(?=[\w+.-]+://)")
_SECRETS = re.compile(r"([?&][^=&#]*pass[^=&#]*=)[^&#]*", re.IGNORECASE)


def parts_of(url: str) -> list[str]:
    """The URLs in a list with semicolons between."""
    return _NEXT_URL.split(url.strip().rstrip(";"))


def host_of(url: str) -> str:
    """Host and port of a URL, also where they are not well formed."""
    return re.split("[/?]", url.partition("://")[2].rpartition("@")[2], maxsplit=1)[0]


def safe_url(url: str) -> str:
    """The URL for messages and logs: passwords masked, also where it is not well formed."""
    return ";".join(_masked(part) for part in _NEXT_URL.split(_SECRETS.sub(r"\1***", url)))


def _masked(url: str) -> str:
    scheme, found, rest = url.partition("://")
    before, rest = (scheme + found, rest) if found else ("", url)
    # Up to the last @: a password that was not escaped may have any character in it.
    login, at, host = rest.rpartition("@")
    if at:
        name, colon, _ = login.partition(":")
        return f"{before}{name + colon if colon else ''}***@{host}"
    place = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if re.search(r":(?!\d*$)(?![^\[]*\])", place):  # no port: a password without its @
        return f"{before}{place.partition(':')[0]}:***"
    return url


def split(url: str) -> tuple[SplitResult, dict[str, str]]:
    """The parts of one URL, and its query.

    Raises:
        LockConfigError: it cannot be taken apart, or is not of a Redis.
    """
    shown, scheme = safe_url(url), url.strip().partition("://")[0].lower()
    if scheme not in ("redis", "rediss", "sentinel", *SOCKETS):
        raise LockConfigError(f"{shown or 'nothing'} is not the URL of a Redis. {_EXAMPLE}")
    try:
        parts = urlsplit(url.strip())
        query = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        if parts.port == 0 or parts.fragment:
            raise ValueError
    except ValueError:  # its own text may quote the password
        raise LockConfigError(
            f"{shown} is not a URL. {_EXAMPLE}; in a password, write @ as %40, / as %2F, "
            "? as %3F, # as %23, % as %25"
        ) from None
    return parts, query
