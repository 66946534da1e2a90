"""The replies of the scripts, decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.protocol import (
    Answer,
    Claim,
    Conflict,
    Deadlocked,
    Duplicate,
    Ended,
    Full,
    Held,
    HoldInfo,
    LockState,
    Message,
    Notice,
    Parked,
    Queued,
    Released,
    WaiterInfo,
)


def answer(claim: Claim, reply: list[Any], repeated: bool, sent: float = 0.0) -> Answer:
    """Of `acquire`."""
    tag = reply[0]
    if tag == b"HELD":
        if len(reply) == 3:  # one lock, as nearly always
            return Held((int(reply[1]),), (reply[2] == 1,), repeated, sent)
        fences = tuple([int(fence) for fence in reply[1::2]])
        return Held(fences, tuple([joined == 1 for joined in reply[2::2]]), repeated, sent)
    if tag == b"WAIT":
        return Queued(reply[1], reply[2] / 1000, repeated)
    if tag == b"BUSY":
        _, index, ms, fence, owner, text, waiting, parked = reply
        name, left, number = claim.names[index - 1], ms / 1000, int(fence or 0)
        place = parked == 1
        return Conflict(name, left, number, owner.decode(), _who(text), waiting, place, repeated)
    if tag == b"DUPLICATE":
        return Duplicate(reply[1] / 1000, _who(reply[2]), repeated)
    if tag == b"DEADLOCK":
        return Deadlocked(tuple(part.decode(errors="replace") for part in reply[1:]))
    return Ended()


def parked(
    claim: Claim, reply: list[Any], repeated: bool, sent: float = 0.0
) -> Held | Parked | Full | Duplicate | Deadlocked | Ended:
    """Of `acquire` with a message."""
    if reply[0] == b"PARKED":
        return Parked(reply[1], messages(reply[2:]))
    if reply[0] == b"FULL":
        return Full(claim.names[reply[1] - 1], reply[2])
    found = answer(claim, reply, repeated, sent)
    assert isinstance(found, Held | Duplicate | Deadlocked | Ended), found
    return found


_RELEASED = Released(True)


def released(reply: list[Any], repeated: bool) -> Released:
    """Of `release`."""
    # Sent twice, the first may have done it: then there is nothing left, as there should be.
    if reply[0] == b"RELEASED":
        return Released(True, messages(reply[2:])) if len(reply) > 2 else _RELEASED
    return Released(repeated, messages(reply[1:]))


def withdrawn(reply: list[Any], repeated: bool) -> Released:
    """Of `withdraw`."""
    return Released(reply[0] == b"WITHDRAWN" or repeated, messages(reply[1:]))


def messages(parts: Sequence[bytes]) -> tuple[Message, ...]:
    """Three values for each message that is handed out."""
    if not parts:
        return ()
    texts = [part.decode() for part in parts]
    return tuple(map(Message, texts[::3], texts[1::3], texts[2::3]))


def beat(reply: list[Any]) -> Held | Queued | None:
    """One line of `heartbeat`'s."""
    if reply[0] == b"HELD":
        return Held((int(reply[1]),), (False,))
    if reply[0] == b"WAIT":
        return Queued(reply[1], reply[2] / 1000)
    return None


def state(reply: list[Any]) -> LockState:
    """Of `inspect`."""
    holds, waiters, waiting = reply
    return LockState(tuple(hold(*facts) for facts in holds), tuple(map(_waiter, waiters)), waiting)


def hold(
    execution_id: bytes, ms: int, fence: bytes, attempt_id: bytes, owner: bytes, label: bytes
) -> HoldInfo:
    """Of `inspect` and `force_release`."""
    return HoldInfo(
        execution_id.decode(),
        ms / 1000,
        int(fence),
        attempt_id.decode(),
        owner.decode(),
        _who(label),
    )


def _waiter(facts: list[Any]) -> WaiterInfo:
    execution_id, ms, attempt_id, owner, label, place = facts
    left = ms / 1000
    return WaiterInfo(
        execution_id.decode(),
        left,
        attempt_id.decode(),
        owner.decode(),
        _who(label),
        parked=place == 1,
    )


def notice(data: bytes | str) -> Notice | None:
    """What was published to an inbox; None for what no script of ours publishes."""
    try:
        text = data.decode() if isinstance(data, bytes) else data
        kind, execution_id, attempt_id, *fence = text.split(" ")
        return Notice(kind, execution_id, attempt_id, int(fence[0]) if fence else 0)
    except ValueError:  # also what is no UTF-8, and a number of too many digits
        return None


def _who(text: bytes) -> str:
    """The part for people; the first word is the holder's inbox."""
    return text.decode(errors="replace").partition(" ")[2]
