"""The backend in Redis: each verb is one script call, its reply decoded here. (What people and the
doctor ask is in `inspection.py` and `examination.py`.)

A single server, a master under Sentinels and a cluster differ in the transport alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from redis.exceptions import ResponseError, TryAgainError

from ...engine import ids
from ...engine.events import logger
from ...engine.outage import Outage
from ...engine.platform import SideThread
from ...engine.protocol import (
    MOST_INSPECTED,
    REMEMBER_CALL,
    SHARED,
    Answer,
    Burst,
    Claim,
    Conflict,
    Deadlocked,
    Debounce,
    Downgraded,
    Ended,
    Full,
    Held,
    HoldInfo,
    Listener,
    LockState,
    Message,
    Notice,
    OtherAttempt,
    ParkAnswer,
    Parked,
    ParkRequest,
    Passed,
    PlaceRequest,
    Queued,
    Release,
    Released,
    Renewal,
    Resumed,
)
from ...errors import LockConfigError, LockUnavailable, RelockError
from .connections import BRIEF, Call, Effort, Transport
from .errors import ONE_NODE, check_server, fields_of, passes, reply_of, translate, with_locks
from .keys import SCHEMA, Keys, in_parts
from .replies import as_text, hold_info, taken_holds
from .scripts import scripts

if TYPE_CHECKING:
    from .examination import Examination
    from .inspection import Inspection

# Renewals in one call: almost the best use of a core, and no call stalls the server for a
# millisecond (`benchmarks/renewal.py`).
BATCH = 100
# In a cluster, seconds until parked messages are looked for again: at a node that could not be
# asked, and at most in a bucket that had none.
_AGAIN, _IDLE = 1.0, 5.0

# The keep-alive thread asks, too, and a log handler may take its time.
_aside = SideThread()
_A = TypeVar("_A", bound=Answer | ParkAnswer)


class RedisBackend:
    """Locks in one Redis; see `engine.protocol.Backend`.

    Args:
        transport: the way to the servers, which runs the scripts.
        namespace: the prefix of all keys.

    Raises:
        LockConfigError: the namespace cannot be used.
    """

    def __init__(self, transport: Transport, namespace: str) -> None:
        self.transport = transport
        self.namespace = namespace
        self.addresses = transport.addresses
        self.replicated = transport.replicas.needed > 0
        self.keys = Keys(namespace, transport.buckets)
        self._scripts = scripts(transport.variant)
        self._agreed: set[str] = set()
        self._idle: dict[tuple[str, int], float] = {}
        self._others = Outage("serving other executions", _aside)

    @property
    def id(self) -> str:
        return ids.digest(repr((sorted(self.transport.addresses), self.namespace)).encode())

    # A caller can hold a lock through its own client, and the task that it calls re-enters through
    # the app's URL: two backends of one Redis have the same locks. Two lists of cluster nodes name
    # the same cluster if they have a node in common.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RedisBackend) or self.namespace != other.namespace:
            return False
        return self is other or not self.addresses.isdisjoint(other.addresses)

    def __hash__(self) -> int:
        return hash(self.namespace)

    def route(self, names: Sequence[str]) -> object:
        return self.transport.route(self.keys.bucket(names[0]))

    def acquire(self, claim: Claim, waiter_lease: float = 0.0, inbox: str = "-") -> Answer:
        place = {"wait": round(waiter_lease * 1000)} if waiter_lease > 0 else {}
        called = self._claim(claim, place, inbox)
        answer = _answer(claim, *self._run("acquire", *called, claim.names))
        return self._left_behind(claim, answer) if claim.parked_at else answer

    def park(self, claim: Claim, park_request: ParkRequest, inbox: str = "-") -> ParkAnswer:
        called = self._claim(claim, _to_park(park_request), inbox)
        reply, repeated, sent = self._run("acquire", *called, claim.names)
        found: ParkAnswer | Answer
        if reply[0] == b"PARKED":
            found = Parked(reply[1], repeated)
        elif reply[0] == b"FULL":
            name = claim.names[reply[1] - 1] if reply[1] else ""
            found = Full(name, *reply[2:])._replace(repeated=repeated)
        else:
            found = _answer(claim, reply, repeated, sent)
        assert not isinstance(found, Queued | Conflict), found
        return self._left_behind(claim, found) if claim.parked_at else found

    def _left_behind(self, claim: Claim, answer: _A) -> _A:
        """Let the message of a claim leave the bucket in which it was parked, if its locks are in
        another one by now: a deploy, or a callable, gives them other names. A script there does not
        see that it has come, and would publish it again without end."""
        bucket = self.keys.bucket(claim.parked_at)
        if bucket == self.keys.bucket(claim.names[0]):
            return answer
        if isinstance(answer, Conflict):
            # Until it is parked here, or withdrawn everywhere.
            return cast(_A, answer._replace(parked=True))
        if not isinstance(answer, OtherAttempt):
            keys = [self.keys.meta(bucket), self.keys.tombstone(claim.execution_id, bucket)]
            with suppress(RelockError):  # then it comes once more, and is found out
                self._run("withdraw", keys, [claim.execution_id, "0", ""])
        return answer

    def release(self, request: Release) -> Released:
        names, execution_id, attempt_id, ended, remember, homes, successor, waited = request
        args = [f"{execution_id} {attempt_id} {_ms(remember)} {ended}", homes]
        if successor is not None:
            args.append(f"{_ms(successor.keep)} {successor.execution_id}")
        keys = self.keys.claim(names, execution_id)
        reply, repeated, _ = self._run("release", keys, args, names, tells_first=waited)
        if len(reply) > 1:
            self._tell_failed(reply[1:2])
        # If the command was sent twice, the first one can have released the hold.
        return Released(reply[0] == b"RELEASED" or repeated, _messages(reply[2:]))

    def downgrade(self, names: Sequence[str], execution_id: str, attempt_id: str) -> Downgraded:
        meta, _, *locks = self.keys.claim(names, execution_id)
        of = [execution_id, attempt_id]
        reply, repeated, _ = self._run("downgrade", [meta, *locks], of, names)
        joined = names[reply[1] - 1] if reply[0] == b"JOINED" else ""
        return Downgraded(reply[0] != b"LOST", joined, repeated)

    def resume(self, homes: str, by: str, tasks: Sequence[str] = ()) -> Resumed:
        args, now = [homes, by, str(BATCH), " ".join(tasks)], time.monotonic()
        every, idle = self.keys.every_bucket, self._idle
        look = [b for b in every if tasks or idle.get((homes, b), 0.0) <= now]
        calls = [([self.keys.meta(b), self.keys.due(b)], args) for b in look]
        outcomes, _ = self._everywhere("resume", calls)
        pauses: list[float] = []
        messages: tuple[Message, ...] = ()
        passed: tuple[Passed, ...] = ()
        for bucket, reply in zip(look, outcomes, strict=True):
            idle.pop((homes, bucket), None)
            if isinstance(reply, Exception):
                pauses.append(_AGAIN)
                continue
            self._tell_failed(reply[1:2])
            passed += tuple(map(_passed, reply[2]))
            messages += _messages(reply[3:])
            if reply[0] >= 0:
                pauses.append(reply[0] / 1000)
            elif len(every) > 1:  # not all buckets at the same time
                idle[homes, bucket] = now + ids.chance.uniform(_IDLE / 2, _IDLE)
        return Resumed(messages, min(pauses, default=None), passed)

    def place(self, request: PlaceRequest) -> int | Conflict:
        marker, execution_id = request.marker, request.execution_id
        times = (request.gap, request.delay, request.moment, request.life)
        millis = [str(round(each * 1000)) for each in times]
        args = [execution_id, request.task, request.label, *millis]
        keys = self.keys.claim([request.line], execution_id)
        if marker is not None:
            keys += [self.keys.lock(marker.names[0])]
            args += [marker.execution_id, _ms(marker.lease), marker.label]
        reply, repeated, sent = self._run("place", keys, args, (request.line,))
        if reply[0] == b"BUSY" and marker is not None:
            found = _answer(marker, reply, repeated, sent)
            assert isinstance(found, Conflict)
            return found
        return int(reply[1]) if reply[0] == b"PLACED" else 0

    def withdraw(self, execution_id: str, remember: float, attempt_id: str = "") -> bool:
        keys, args = self.keys, [execution_id, _ms(remember), attempt_id]
        every = keys.every_bucket
        calls = [([keys.meta(b), keys.tombstone(execution_id, b)], args) for b in every]
        failed, had = None, False
        outcomes, repeated = self._everywhere("withdraw", calls)
        for reply in outcomes:
            if isinstance(reply, Exception):
                failed = reply
            else:
                # A copy whose answer was lost can have withdrawn it, and has left the tombstone.
                before = repeated and (not remember or reply[0] == b"ENDED")
                had = had or before or reply[0] == b"WITHDRAWN"
        if failed is not None and not had:
            raise translate(failed) from failed
        return had

    def arrived(self, execution_ids: Sequence[str], seconds: float) -> None:
        args = [_ms(seconds), " ".join(execution_ids)]
        calls = [([self.keys.meta(b)], args) for b in self.keys.every_bucket]
        for reply in self._everywhere("arrived", calls)[0]:
            if not isinstance(reply, Exception):
                self._tell_failed(reply)

    def announce(self, channels: Sequence[str], worker: str, seconds: float) -> None:
        self._agree(self.keys.meta())
        self._live(channels, worker, seconds)

    def consumed(self, channel: str) -> bool:
        (count,) = self._live([channel], "", 0)
        return bool(count)

    def _live(self, channels: Sequence[str], worker: str, seconds: float) -> list[int]:
        keys, args = [self.keys.live(channel) for channel in channels], [worker, _ms(seconds)]
        # Once, and briefly: nobody waits for a failover to hear where a message goes.
        (outcome,) = self.transport.run_each(
            self._scripts["announce"], [(keys, args)], Effort(BRIEF)
        )
        counts: list[int] = reply_of(outcome)
        return counts

    def burst(self, name: str, whole: bool) -> Burst | None:
        asks = ["-", "-", "", str(int(whole)), "0", "0", "0", "", ""]
        reply, *_ = self._run("debounce", self.keys.claim((name,), "-"), asks, (name,))
        return _burst(reply)

    def debounce(
        self, name: str, call: Debounce, park_request: ParkRequest
    ) -> Parked | Burst | Full | None:
        place = {"id": call.task_id, **_to_park(park_request)}
        known = call.burst or Burst(call.call_id, "", "")
        args = [
            *(known.burst_id, call.call_id, known.call_id, str(int(call.exactly))),
            *(_ms(call.pause), _ms(call.most), _ms(REMEMBER_CALL), call.label),
            json.dumps(place, ensure_ascii=False),
        ]
        reply, *_ = self._run("debounce", self.keys.claim((name,), call.call_id), args, (name,))
        if reply[0] == b"PARKED":
            return Parked(0)
        if reply[0] == b"FULL":
            return Full(name if reply[1] else "", *reply[2:])
        return _burst(reply)

    def renew(
        self, renewals: Sequence[Renewal], *, within: float | None = None, once: bool = False
    ) -> list[bool]:
        found = self._in_batches("renew", renewals, self._renew_call, within, once)
        return [kept == 1 for kept in found]

    def _renew_call(self, part: Sequence[Renewal]) -> Call:
        """The keys and arguments of `renew`, for up to `BATCH` holds of one bucket."""
        keys = [self.keys.lock(each.name) for each in part]
        return keys, [f"{r.execution_id} {r.attempt_id} {_ms(r.lease)} {r.longer:d}" for r in part]

    def heartbeat(
        self, renewals: Sequence[Renewal], *, within: float | None = None
    ) -> list[Held | Queued | None]:
        found = self._in_batches("heartbeat", renewals, self._heartbeat_call, within)
        return [_place(line) for line in found]

    def _heartbeat_call(self, part: Sequence[Renewal]) -> Call:
        """The keys and arguments of `heartbeat`, for up to `BATCH` places of one bucket."""
        meta = self.keys.meta(self.keys.bucket(part[0].name))
        args = [
            f"{r.execution_id} {r.attempt_id} {_ms(r.waiter_lease)} {_ms(r.lease)}" for r in part
        ]
        return [meta, *(self.keys.lock(each.name) for each in part)], args

    def inspect(self, name: str, only: Sequence[str] = (), most: int = MOST_INSPECTED) -> LockState:
        script = self._scripts["survey"]
        try:
            self._agree(self.keys.meta(self.keys.bucket(name)))
            args = [str(most), "0", " ".join(only)]
            (_, found, *_), *_ = self.transport.run(script, [self.keys.lock(name)], args)
            if len(found) == 1:
                raise translate(ResponseError(as_text(found[0])))
        except RelockError as error:
            raise with_locks(error, "inspect", (name,)) from error.__cause__
        _, waiting, _, holds, _ = found
        return LockState(tuple(hold_info(*each) for each in holds), waiting)

    def force_release(self, name: str, execution_id: str = "") -> tuple[HoldInfo, ...]:
        keys = [self.keys.meta(self.keys.bucket(name)), self.keys.lock(name)]
        taken, *_ = self._run("force_release", keys, [execution_id], (name,))
        return taken_holds(taken)

    def inspection(self) -> Inspection:
        """What people ask; see `engine.inspection`."""
        from .inspection import Inspection  # no worker needs it

        return Inspection(self.transport, self.keys, self._scripts)

    def examination(self) -> Examination:
        """What `relock doctor` asks; see `engine.inspection`."""
        from .examination import Examination  # no worker needs it

        return Examination(self.transport, self.keys, self._scripts)

    def listen(self, inbox: str, listener: Listener) -> None:
        def heard(notice: Notice) -> None:
            self._idle.clear()  # the notice can be about a parked message
            listener.hear(notice)

        channel = partial(self.keys.inbox, inbox)
        self.transport.listen(channel, listener._replace(hear=heard))

    def _claim(self, claim: Claim, place: dict[str, Any], inbox: str) -> Call:
        if claim.stuck:
            # Also without a wait: whom it passes, the script says.
            place["stuck"] = claim.stuck
        who = f"{claim.execution_id} {claim.attempt_id} {claim.owner}"
        limits = " ".join(map(str, claim.limits))
        args = [f"{who} {_ms(claim.lease)} {claim.by_owner:d} {inbox} {limits}", claim.label]
        if place or claim.ancestors:
            args.append(" ".join(claim.ancestors))
        if place:
            args.append(json.dumps(place, ensure_ascii=False))
        return self.keys.claim(claim.names, claim.execution_id), args

    def _run(
        self,
        verb: str,
        keys: Sequence[str],
        args: Sequence[str],
        names: Sequence[str] = (),
        tells_first: bool = False,
    ) -> tuple[Any, bool, float]:
        try:
            if keys[0] not in self._agreed:
                self._agree(keys[0])
            script = self._scripts[verb]
            if tells_first:
                script = script._replace(tells_first=True)
            return self.transport.run(script, keys, args)
        except RelockError as error:
            raise with_locks(error, verb, names) from error.__cause__

    def _agree(self, meta: str) -> None:
        """Check the server's version and the layout before this process's first command for a
        bucket. Also check the layout of the first bucket, which every process checks; if its server
        cannot be reached, at another time."""
        layout = [str(SCHEMA), str(self.keys.buckets), self.transport.variant]
        script = self._scripts["open"]
        if meta not in self._agreed:
            self._check_layout(meta, self.transport.run(script, [meta], layout)[0])
        first = self.keys.meta()
        if first not in self._agreed:
            (outcome,) = self.transport.run_each(script, [([first], layout)], Effort(BRIEF))
            if not (isinstance(outcome, Exception) and passes(outcome)):
                self._check_layout(first, reply_of(outcome))

    def _check_layout(self, meta: str, reply: Sequence[bytes]) -> None:
        if reply[0] == b"CLUSTER":
            raise LockConfigError(ONE_NODE)
        if reply[0] != b"OK":
            raise self.keys.other_layout(*map(as_text, reply[1:]))
        if not self._agreed:
            self._look_at_server(meta)
        self._agreed.add(meta)

    def _look_at_server(self, key: str) -> None:
        # Scripts ignore a PUBLISH that is forbidden, so only this command reveals it.
        asked = [("INFO", "server"), ("PUBLISH", self.keys.inbox("-"), "")]
        info, heard = self.transport.at(key).answers(*asked)
        check_server(fields_of(info))
        if isinstance(heard, Exception):
            logger.warning(
                "Cannot notify waiters of grants, so they find out seconds later: %s",
                translate(heard),
            )

    def _in_batches(
        self,
        verb: str,
        renewals: Sequence[Renewal],
        call: Callable[[Sequence[Renewal]], Call],
        within: float | None,
        once: bool = False,
    ) -> list[Any]:
        """One line of a reply for each renewal."""
        script = self._scripts[verb]
        parts = in_parts(renewals, lambda each: self.keys.bucket(each.name), BATCH)
        calls = list(map(call, parts))
        effort = Effort(within, once, renewing=within is not None and not once)
        try:
            if within is None:
                outcomes = [self.transport.run(script, *each)[0] for each in calls]
            else:
                outcomes = self.transport.run_each(script, calls, effort)
            found: dict[Renewal, Any] = {}
            for part, outcome in zip(parts, outcomes, strict=True):
                if isinstance(outcome, TryAgainError) and verb == "renew":
                    # While a slot moves, its keys are at two nodes, so each key needs its own call.
                    replies = self.transport.run_each(
                        script, [call([each]) for each in part], effort
                    )
                    lines = [reply_of(each)[0] for each in replies]
                else:
                    lines = reply_of(outcome)
                found.update(zip(part, lines[: len(part)], strict=True))
                self._tell_failed(lines[len(part) :])
            return [found[renewal] for renewal in renewals]
        except RelockError as error:
            names = [each.name for each in renewals]
            raise with_locks(error, verb, names) from error.__cause__

    def _tell_failed(self, failed: Sequence[bytes]) -> None:
        """Log what a script has not done for somebody else than its caller, which goes on."""
        for said in filter(None, failed):
            with self._others:
                raise translate(ResponseError(as_text(said)))

    def _everywhere(self, verb: str, calls: Sequence[Call]) -> tuple[list[Any], bool]:
        """The outcomes of a verb in some buckets, and whether the verb may have been executed more
        than once. On one server it is repeated as usual. In a cluster, messages of the other nodes
        do not wait for a node that cannot be reached: it raises only if all outcomes are errors."""
        if self.keys.buckets == 1:
            reply, repeated, _ = self._run(verb, *calls[0])
            return [reply], repeated
        effort = Effort(everywhere=True)
        outcomes = self.transport.run_each(self._scripts[verb], calls, effort)
        failed = [each for each in outcomes if isinstance(each, Exception)]
        if failed and len(failed) == len(outcomes):
            raise translate(failed[0]) from failed[0]
        if failed:
            logger.debug("%s did not reach all of the cluster: %s", verb, failed[0])
        # A node that did not answer counts as well, so this says nothing if there is one.
        return outcomes, not failed and effort.unheard > 0


class LaterBackend(RedisBackend):
    """Locks in a Redis to which there is no way yet, as the client connects when it is made, and
    could not. Each verb tries once more, and raises as if Redis did not answer.

    Args:
        make: the way to the servers. Raises a RelockError while there is none.
        namespace: the prefix of all keys.
        replicated: whether a hold counts only when replicas have it.

    Raises:
        LockConfigError: the namespace cannot be used.
    """

    def __init__(self, make: Callable[[], Transport], namespace: str, replicated: bool) -> None:
        Keys(namespace)
        self._make = make
        self.namespace, self.replicated = namespace, replicated
        self.addresses = frozenset()  # so it equals no other
        self._failed = -math.inf, ""

    @property
    def id(self) -> str:
        try:
            return super().id
        except LockUnavailable:
            return ""  # nobody's: what is noted for it was never sent

    def route(self, names: Sequence[str]) -> object:
        return super().route(names) if "transport" in vars(self) else None

    def release(self, request: Release) -> Released:
        try:
            return super().release(request)
        except LockUnavailable:
            if "transport" in vars(self):
                raise
            return Released(False)  # nothing was ever sent, so nobody has to try again

    def __getattr__(self, name: str) -> Any:
        if name not in ("transport", "keys", "_scripts", "_agreed", "_idle", "_others"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name)
        at, reason = self._failed
        if time.monotonic() < at + Transport.AFTER:  # to try can take long
            raise LockUnavailable(reason)
        try:
            super().__init__(self._make(), self.namespace)
        except LockUnavailable as error:
            self._failed = time.monotonic(), error.reason
            raise
        return vars(self)[name]


@lru_cache  # there are few lengths of leases
def _ms(seconds: float) -> str:
    """Whole milliseconds, as an argument of a script."""
    return str(round(seconds * 1000))


def _to_park(of: ParkRequest) -> dict[str, Any]:
    """What `acquire` and `debounce` read of a message that is to be parked."""
    place = of._asdict()
    if (patience := place.pop("patience")) is not None:
        place["patience"] = max(round(patience * 1000), 0)
    return place


def _answer(claim: Claim, reply: list[Any], repeated: bool, sent: float) -> Answer:
    """What `acquire` replied; `repeated` and `sent` as `Transport.run` tells them."""
    tag = reply[0]
    if tag == b"HELD":
        resumed = reply[-1] == b"resumed"
        pairs = reply[1:-1] if resumed else reply[1:]
        reentered = tuple(map(b"1".__eq__, pairs[1::2]))
        return Held(tuple(map(int, pairs[::2])), reentered, repeated, sent, resumed)
    if tag == b"WAIT":
        return Queued(int(reply[1]), int(reply[2]) / 1000, repeated)
    if tag == b"BUSY":
        _, index, ms, fence, owner, label, waiting, parked, shared, kept = reply
        return Conflict(
            claim.names[index - 1],
            remaining=ms / 1000,
            fence=int(fence or 0),
            owner=owner.decode(),
            label=_label(label),
            waiting=waiting,
            parked=parked == 1,
            repeated=repeated,
            shared=shared == 1,
            outranked=shared == 1 and claim.limits[index - 1] == SHARED,
            kept=kept == 1,
        )
    if tag == b"ATTEMPT":
        return OtherAttempt(reply[1] / 1000, _label(reply[2]), repeated)
    if tag == b"DEADLOCK":
        return Deadlocked(tuple(map(as_text, reply[1:])), repeated)
    if tag == b"ENDED":
        return Ended(reply[1:] == [b"replaced"], reply[1:] == [b"retried"])
    # Never to be taken for the end of an execution: its message would be dropped.
    raise LockConfigError(f"Redis gave an answer that this version does not know: {reply!r:.200}")


def _burst(reply: Sequence[Any]) -> Burst | None:
    return Burst(*map(bytes.decode, reply[1:])) if reply[0] == b"BURST" else None


def _messages(parts: Sequence[bytes]) -> tuple[Message, ...]:
    """The messages that were handed out, from three values each."""
    texts = list(map(bytes.decode, parts))
    return tuple(map(Message, texts[::3], texts[1::3], texts[2::3]))


def _passed(text: bytes) -> Passed:
    line, execution_id, label, waited = json.loads(text)
    return Passed(line, execution_id, label, waited / 1000)


def _place(line: bytes) -> Held | Queued | None:
    """One line of what `heartbeat` replied; None if there is neither a hold nor a place."""
    tag, *told = line.split()
    if tag == b"HELD":
        return Held((int(told[0]),), (False,))
    return Queued(int(told[0]), int(told[1]) / 1000) if tag == b"WAIT" else None


def _label(text: bytes) -> str:
    """The part of a stored label that is for people. Its first word is the holder's inbox. (As in
    `replies`, a file that a task on its way does not pass.)"""
    return text.decode(errors="backslashreplace").partition(" ")[2]
