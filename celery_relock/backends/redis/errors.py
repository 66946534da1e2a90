"""Translation of redis-py's errors into ours, which say what is wrong and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import redis.exceptions as errors

from ...engine.protocol import DEBOUNCE, LINE, MARKER, lock_names
from ...errors import LockConfigError, LockUnavailable, RelockError

# The errors of redis-py and its sockets. All others are not translated: they are programming
# errors, or were raised from outside, such as a soft time limit.
FAULTS = (errors.RedisError, OSError)


class ProviderFailed(errors.ConnectionError):
    """A credential provider has raised an error, so there is no connection."""


class TooFewReplicas(errors.RedisError):
    """Fewer replicas than required have acknowledged a write."""


# The faults of servers, by all their names: what is wrong and what to do. A name is the code that
# the server's answer begins with; or a class of redis-py, which strips the code from the text of
# some errors (of which, differs between versions); or a word of ours, in lower case, where there is
# neither. These pass within seconds …
_SOON = {
    "READONLY ReadOnlyError": "this Redis is a read-only replica: a failover is going on, or the "
    "URL is not the master's",
    "MASTERDOWN MasterDownError": "this Redis is a replica that has lost its master",
    "UNBLOCKED": "this Redis has just become a replica",
    "LOADING BusyLoadingError": "Redis has just started and still loads its data",
    "BUSY": "Redis is busy with a long script: see SCRIPT KILL, and find out who runs the script",
    # After a failover replicas need a moment to find the new master.
    "NOREPLICAS": "Redis has too few replicas to accept writes (min-replicas-to-write)",
    "TooFewReplicas": "too few replicas have acknowledged the write (relock_min_replicas), so it "
    "is not valid: see INFO replication",
    "CLUSTERDOWN ClusterDownError": "the Redis Cluster is down, or no node serves this slot",
    "TRYAGAIN TryAgainError": "the Redis Cluster is moving this slot",
    "full": "Redis has no connection left (maxclients)",
}
# … these take longer …
_LATER = {
    "OOM OutOfMemoryError": "Redis is out of memory (maxmemory) and accepts no writes: raise "
    "maxmemory, or delete data",
    "MISCONF": "Redis cannot save to its disk and accepts no writes: see its log",
    "killed": "the script was stopped with SCRIPT KILL",
    "InvalidResponse": "the server there does not speak Redis's protocol: check host and port",
}
#: What is wrong where a client takes a node of a cluster for the only server.
ONE_NODE = (
    "this is one node of a Redis Cluster: set relock_url to redis+cluster://host:port,host:port "
    "with some of its nodes"
)
# … and with these no later try helps.
_NEVER = {
    "NOAUTH WRONGPASS AuthenticationError AuthenticationWrongNumberOfArgsError": "Redis refuses "
    "the login: check user and password in relock_url (or in the URL of the result backend or the "
    "broker); write special characters as %40 and so on",
    "NOPERM NoPermissionError AuthorizationError": "this Redis user lacks permissions that locks "
    "need: give it the keys ~<namespace>:*, the channels &<namespace>:* and the commands "
    "+@connection +@read +@write +@scripting +@pubsub +time +info (ACL SETUSER), or the shorter "
    "list under 'A user and a password' in the docs",
    "WRONGTYPE RELOCK-FOREIGN": "a key is in use for something else; nothing was overwritten. Set "
    "relock_namespace to a prefix of your own",
    "junk": "a number that locks keep in Redis was overwritten by something else. Look into the "
    "hash <namespace>:{…}:meta: delete its field that is no number (fence, parked, bytes or clock; "
    "HDEL), and set relock_namespace to a prefix of your own",
    "unknown": "the server does not know a command that locks need: use Redis 6.2 or newer, or "
    "Valkey, without renamed commands",
    "database": "Redis does not have the database that the URL names",
    "MOVED ASK CROSSSLOT MovedError AskError ClusterCrossSlotError": ONE_NODE,
    "DENIED": "Redis is in protected mode and refuses connections from other machines",
    "tls": "the TLS connection failed: check rediss:// and the ssl_ options (relock_use_ssl)",
}
# Which fault it is if the answer begins with no code.
_TEXTS = (
    (r"max number of clients (\+ cluster connections )?reached", "full"),
    (r"\[SSL.*(CERTIFICATE|WRONG_VERSION_NUMBER|UNKNOWN_CA|PEM lib)|\[X509", "tls"),
    (r"no cipher can be selected|no start line", "tls"),
    (r"unknown (redis )?command", "unknown"),
    (r"the user executing the script can't|no permissions", "NOPERM"),
    (r"DB index is out of range|SELECT is not allowed", "database"),
    (r"without any password configured|no password is set|invalid password", "NOAUTH"),
    (r"script killed by user", "killed"),
    (r"attempt to (perform arithmetic|compare)|value is not an integer", "junk"),
    (r"WAIT cannot be used with replica", "READONLY"),  # since a moment ago
)


class _Fault(NamedTuple):
    code: str
    passes: str
    says: str


_FAULTS = {
    name: _Fault(names.split()[0], passes, says)
    for passes, faults in (("soon", _SOON), ("later", _LATER), ("never", _NEVER))
    for names, says in faults.items()
    for name in names.split()
}

# An error inside a script comes wrapped. Redis 6.2: `Error running script (call to f_<sha>):
# @user_script:1: @user_script: 1: -OOM command …`; since 7.0: `OOM command … script: <sha>, on
# @user_script:1.`
_WRAPPING = re.compile(
    r"Error running script \(call to \w+\): |@?user_script: ?\d+: "
    r"| script: [0-9a-f]+, on @user_script:\d+\.$"
)
_CODE = re.compile(r"(?:ERR )?-?([A-Z][A-Z-]+)\b")
_AWAY = "Redis cannot be reached: check that it runs, and the address"
# What a verb does, where its name does not say so to a person.
_DOES = {
    "place": "take a place in",
    "debounce": "look for",
    "force_release": "release",
    "heartbeat": "wait for",
}
# What a name stands for that is not a lock's own.
_WHAT = {MARKER: "the dedup marker for", DEBOUNCE: "the burst of calls for", LINE: "the order of"}

# Who has the permissions that locks need may lack these.
_TO_LOOK = re.compile(r"'(h?scan)' command")
_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
# The attribute of an error that names the failed connection: timeouts do not name it.
_ADDRESS = "relock_address"
_SPEAKS_TLS = ". If this port speaks TLS, the URL has to begin with rediss://"
_SPEAKS_NO_TLS = (
    ". If this port speaks no TLS, the URL has to begin with redis://, without relock_use_ssl"
)


def note_address(error: BaseException, link: Any, heard: bool) -> None:
    """Note on an error which server its connection was for, and whether that ever answered."""
    if isinstance(error, FAULTS):
        # Where AUTH is renamed or missing, the server repeats what it does not know: the password.
        error.args = tuple(_ARGUMENTS.sub("", str(each)) for each in error.args)
        is_tls = any(kind.__name__ == "SSLConnection" for kind in type(link).__mro__)
        setattr(error, _ADDRESS, (address_of(link), None if heard else is_tls))


def address_of(link: Any) -> str:
    """Where a connection leads to, for people."""
    return str(link.path) if hasattr(link, "path") else f"{link.host}:{link.port}"


def _said(error: Exception) -> str:
    said = _WRAPPING.sub("", str(error)) or type(error).__name__
    address, is_tls = getattr(error, _ADDRESS, ("", None))
    if address not in said:
        said = f"{address}: {said}"
    if is_tls and (isinstance(error, errors.TimeoutError) or "WRONG_VERSION_NUMBER" in said):
        return said.removesuffix(".") + _SPEAKS_NO_TLS
    # A server that speaks TLS closes the connection when it reads anything else.
    closed = isinstance(error, errors.ConnectionError) and not refused(error)
    closed = closed and "connecting to" not in said
    if is_tls is False and closed and not isinstance(error, errors.TimeoutError | ProviderFailed):
        return said.removesuffix(".") + _SPEAKS_TLS
    return said


def translate(error: Exception) -> RelockError:
    """The error to raise instead: LockUnavailable if a later try can help, else LockConfigError."""
    code, said = _code(error), _said(error)
    if code == "NOPERM" and (lacks := _TO_LOOK.search(said)):
        return LockConfigError(
            f"this Redis user lacks +{lacks[1]}, which locks do not need, but a look at all of "
            f"them does: ACL SETUSER … +{lacks[1]} ({said})"
        )
    if fault := _FAULTS.get(code):
        kind = LockConfigError if fault.passes == "never" else LockUnavailable
        return kind(f"{fault.says} ({said})")
    if _is_of_the_way(error):
        return LockUnavailable(f"{_AWAY} ({said})")
    return LockConfigError(f"Redis refused the command ({error!r}: {error})")


def reply_of(outcome: Any) -> Any:
    """The reply in an outcome. Raises a RelockError if the outcome is an error."""
    if isinstance(outcome, Exception):
        raise translate(outcome) from outcome
    return outcome


def with_locks(error: RelockError, verb: str, names: Sequence[str]) -> RelockError:
    """The error, with what was to be done with which locks."""
    if not names or error.name is not None:
        return error
    first, *others = (*lock_names(names[0]), *names[1:])
    what = next((what for kind, what in _WHAT.items() if names[0].startswith(kind)), "lock")
    more = f" and {len(others)} more" if others else ""
    text = f"Cannot {_DOES.get(verb, verb)} {what} {first!r}{more}: {error.reason}"
    return type(error)(text, None if more else first)


def refused(error: BaseException) -> bool:
    """Whether a connection ended with an answer: redis-py takes that of a server that loads its
    data, has no connection left or wants a login for the end of the connection."""
    return isinstance(error, errors.ConnectionError) and _code(error) != ""


def demoted(error: Exception) -> bool:
    """Whether an error is the answer of a replica, after a failover of the old master."""
    return _code(error) in ("READONLY", "MASTERDOWN", "UNBLOCKED")


def passes(error: Exception) -> bool:
    """Whether the same command can succeed within seconds."""
    fault = _FAULTS.get(_code(error))
    return _is_of_the_way(error) if fault is None else fault.passes == "soon"


def forbids(error: Exception, *, is_old: bool = True) -> bool:
    """Whether an error says that the Redis user lacks a permission; or, unless the command is newer
    than some servers, that the server does not have it: a managed one may hide CONFIG."""
    code = _code(error)
    return code == "NOPERM" or (is_old and code == "unknown")


def check_server(info: Mapping[str, Any]) -> None:
    """Check by a server's INFO that it has the commands that the scripts need.

    Raises:
        LockConfigError: the server is older than Redis 6.2. (Valkey also reports a version of
            Redis with which it is compatible.)
    """
    version = str(info.get("redis_version", ""))
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < (6, 2):
        raise LockConfigError(
            f"Redis {version} is too old for celery-relock: it needs Redis 6.2 or newer, or Valkey"
        )


def fields_of(info: Any) -> dict[str, str]:
    """The fields of an INFO reply; none if the server refused it."""
    lines = info.decode().splitlines() if isinstance(info, bytes) else []
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _is_of_the_way(error: Exception) -> bool:
    return isinstance(error, errors.ConnectionError | errors.TimeoutError | OSError)


def _code(error: Exception) -> str:
    """The code of a Redis error, or a word of ours for an error without one; "" if unknown."""
    text = _WRAPPING.sub("", str(error))
    code = _CODE.match(text)
    for name in (*(kind.__name__ for kind in type(error).__mro__), code[1] if code else ""):
        if name in _FAULTS:
            return _FAULTS[name].code
    said = (code for pattern, code in _TEXTS if re.search(pattern, text, re.IGNORECASE))
    return next(said, "")
