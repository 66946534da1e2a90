"""The way to a Redis: runs scripts where their keys are, and sends them again when it may help.

Every verb may be sent twice, so a command whose answer is lost is sent again, within a stated
patience. This one is for one server; `sentinel` and `cluster` say what is different there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from ...engine.protocol import Notice
from ...errors import LockUnavailable
from .connections import NONE, Call, Connections, Effort, Replicas
from .errors import FAULTS, passes, translate
from .scripts import Script
from .subscription import Subscription

Channel: TypeAlias = "Callable[[int], str]"
Ready: TypeAlias = "Callable[[], None]"
Hear: TypeAlias = "Callable[[Notice], None]"

# How often a subscription is held against where it should lead to, in seconds.
_LOOK = 2.0


class Transport:
    """The way to one server.

    Args:
        work, renewals: connections to it, the latter for the keep-alive thread.
        place: what tells this Redis from others; two with a part in common are one.
        replicas: how many have to have a hold before it counts.

    Attributes:
        fingerprint: the same for another way to it with the same options and credentials.
        where: the way of publishing that its scripts need.
        buckets: over how many its keys are spread.
    """

    # How long a command is repeated before the server counts as unreachable, in seconds.
    PATIENCE = 2.0
    # How long the next caller, so soon after, waits for an answer: giving back a lock that could
    # not be acquired must not double the time in which nothing happens.
    _AFTER = _BRIEF = 1.0
    _PAUSES = (0.0, 0.05, 0.1, 0.2)

    fingerprint = ""
    where = "server"
    buckets = 1

    def __init__(
        self,
        work: Connections,
        renewals: Connections,
        place: Iterable[tuple[Any, ...]],
        replicas: Replicas = NONE,
    ) -> None:
        self.place = frozenset(place)
        self.replicas = replicas
        self._work = work
        self._renewals = renewals
        self._gave_up_at = -math.inf

    def run(self, script: Script, keys: Sequence[str], args: Sequence[str]) -> tuple[Any, bool]:
        """Run one script. Returns its reply, strings as bytes, and whether it may have been
        executed more than once.

        Raises:
            LockUnavailable, LockConfigError: translated from what redis-py raises.
        """
        started, tries = time.monotonic(), 0
        brief = started - self._gave_up_at < self._AFTER
        effort = Effort(self._BRIEF if brief else None)
        while True:
            try:
                reply = self._once(script, (keys, args), effort)
                if not isinstance(reply, Exception):
                    return reply, effort.unheard > 0
                raise reply
            except FAULTS as error:
                again = passes(error)
                patience = self._patience(error) if again and not brief else 0.0
                if time.monotonic() - started >= patience:
                    if again:
                        self._gave_up_at = time.monotonic()
                    raise translate(error, script.name) from error
            time.sleep(self._PAUSES[min(tries, len(self._PAUSES) - 1)])
            tries += 1

    def run_each(
        self, script: Script, calls: Sequence[Call], within: float | None = None
    ) -> list[Any]:
        """The outcome of each call, a reply or an error; nothing is repeated. `within`: the
        keep-alive thread calls, and waits so many seconds for an answer at the most."""
        try:
            return (self._renewals if within else self._work).call(script, calls, Effort(within))
        except FAULTS as error:
            return [error] * len(calls)

    def at(self, key: str) -> Connections:
        """Where a key is. Raises RedisError if nobody can tell."""
        return self._work

    def masters(self) -> list[Connections]:
        """Every server that has keys. Raises as `at` does."""
        return [self._work]

    def route(self, bucket: int) -> object:
        """Which server has a bucket, as far as is known."""
        return None

    def listen(self, channel: Channel, ready: Ready, hear: Hear) -> None:
        """Hear an inbox for ever, see `Backend.listen`. `channel` is its name in a bucket."""
        subscription = Subscription(self._work.make, [channel(0)])
        try:
            ready()
            while self._work.fits(subscription.link):
                if (notice := subscription.hear(_LOOK)) is not None:
                    hear(notice)
        finally:
            subscription.close()
        # A replica repeats the messages, but the master does not know that it is heard.
        raise LockUnavailable("the inbox's server is the master no more")

    def close(self) -> None:
        """Close what is idle; all can still be used."""
        self._work.close()
        self._renewals.close()

    def _once(self, script: Script, call: Call, effort: Effort) -> Any:
        return self._work.call(script, [call], effort)[0]

    def _patience(self, error: Exception) -> float:
        """For how many seconds a command that failed so is repeated."""
        return self.PATIENCE
