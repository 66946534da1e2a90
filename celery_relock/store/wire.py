"""Calls of scripts on one connection, in the wire format (RESP, the same in every version)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

from redis.exceptions import NoScriptError, ResponseError

from .scripts import Script

Call: TypeAlias = tuple[Sequence[str], Sequence[str]]
Send: TypeAlias = Callable[[Any, bytes, Script, Sequence[str], Sequence[str]], Any]

# Calls that are sent before the first answer is read: few enough for the buffers of a socket.
IN_FLIGHT = 4
PING = b"*1\r\n$4\r\nPING\r\n"


def one(link: Any, packed: bytes, script: Script, keys: Sequence[str], args: Sequence[str]) -> Any:
    """Send a packed call of a script and return its answer."""
    _send(link, packed)
    return _answer(link, script, keys, args)


def one_eagerly(
    link: Any, packed: bytes, script: Script, keys: Sequence[str], args: Sequence[str]
) -> Any:
    """The same where nobody else waits for it: the answer is looked out for."""
    _send(link, packed)
    if _is_plain(link.__class__):
        link.busy_poll.wait(link._sock)
    return _answer(link, script, keys, args)


def one_last(
    link: Any, packed: bytes, script: Script, keys: Sequence[str], args: Sequence[str]
) -> Any:
    """The same where others wait for it: what the script publishes goes out before the answer."""
    # Redis writes to its clients last what it had to say first. So the caller, whom the script
    # answers after it has told the next one, would hear, and be running, before that one. By the
    # answer to a PING it is the first, and hears last.
    _send(link, PING + packed)
    read(link)
    return _answer(link, script, keys, args)


def _send(link: Any, packed: bytes) -> None:
    if _is_plain(link.__class__) and link._sock is not None:
        link._sock.sendall(packed)
    else:
        link.send_packed_command((packed,), check_health=False)


def _answer(link: Any, script: Script, keys: Sequence[str], args: Sequence[str]) -> Any:
    if _is_plain(link.__class__):
        answer = link._parser.read_response(disable_decoding=True)
    else:
        answer = read(link)
    if isinstance(answer, NoScriptError):
        answer = evaluate(link, script, keys, args)
    try:
        if isinstance(answer, Exception):
            raise answer
        return answer
    finally:
        # Its traceback has this frame, and that the connection: a ring, until somebody looks for
        # it.
        del answer


@cache
def _is_plain(kind: type) -> bool:
    """Whether what its methods do besides sending and reading is to close it when that fails, which
    our callers do as well: it takes longer than the rest."""
    return kind.__module__ == "redis.connection" and "Cache" not in kind.__name__


def several(link: Any, script: Script, calls: Sequence[Call]) -> list[Any]:
    replies = []
    for start in range(0, len(calls), IN_FLIGHT):
        part = calls[start : start + IN_FLIGHT]
        link.send_packed_command(
            [pack(script, keys, args) for keys, args in part], check_health=False
        )
        # Every answer is read before one is acted on: an error must not leave some behind.
        answers = [read(link) for _ in part]
        for (keys, args), answer in zip(part, answers, strict=True):
            if isinstance(answer, NoScriptError):
                answer = evaluate(link, script, keys, args)
            if isinstance(answer, Exception):
                try:
                    raise answer
                finally:
                    del answer, answers  # as in `_answer`
            replies.append(answer)
    return replies


def read(link: Any) -> Any:
    try:
        return link.read_response(disable_decoding=True)
    except ResponseError as error:
        return error


def evaluate(link: Any, script: Script, keys: Sequence[str], args: Sequence[str]) -> Any:
    """EVAL, not SCRIPT LOAD and once more EVALSHA: one trip, and a failover cannot come between."""
    link.send_command("EVAL", script.source, len(keys), *keys, *args, check_health=False)
    return read(link)


def pack(script: Script, keys: Sequence[str], args: Sequence[str]) -> bytes:
    """EVALSHA in the wire format (RESP, the same in every version).

    Not by `hiredis.pack_command`, faster as it is: a signal that arrives in it, such as that of a
    soft time limit, crashes the process (hiredis 3.5).
    """
    values = (str(len(keys)), *keys, *args)
    start = f"*{len(values) + 2}\r\n{script.call}"
    text = "".join([f"${len(value)}\r\n{value}\r\n" for value in values])
    if text.isascii():  # then characters are bytes, and nothing is encoded one by one
        return (start + text).encode()
    parts = [value.encode() for value in values]
    return start.encode() + b"".join([b"$%d\r\n%b\r\n" % (len(p), p) for p in parts])
