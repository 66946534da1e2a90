"""The verbs of `RedisStore` for the nodes of a cluster, each call for one bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.protocol import Held, Queued, Renewal
from . import replies, wire
from .keyspace import Keyspace
from .nodes import Nodes
from .redirections import cause_of, is_unstable, translated
from .redis import BATCH, RedisBackend, _text
from .scripts import Script, sharded
from .wire import Call


class Routed(RedisBackend):
    """The verbs for locks of one bucket.

    Args:
        work: whatever runs a script.
    """

    def __init__(self, keyspace: Keyspace, work: Any) -> None:
        self._keys = keyspace
        self._scripts = sharded()
        self._work = work


class Within:
    """Runs scripts for the keep-alive thread."""

    def __init__(self, nodes: Nodes, within: float | None) -> None:
        self._nodes = nodes
        self._within = within

    def run(
        self, script: Script, keys: Sequence[str], args: Sequence[str], _: wire.Send = wire.one
    ) -> tuple[Any, int]:
        return self._nodes.run_all(script, [(keys, args)], self._within)[0], 1


def renew_all(
    nodes: Nodes, keys: Keyspace, renewals: Sequence[Renewal], within: float | None
) -> list[bool]:
    """As `LockStore.renew`."""
    script = sharded()["renew"]
    batches = _batches(keys, renewals)
    calls = [_renewal(keys, [renewals[i] for i in batch]) for batch in batches]
    kept = [False] * len(renewals)
    outcomes = nodes.outcomes(script, calls, within, failover=0.0)
    for batch, call, outcome in zip(batches, calls, outcomes, strict=True):
        lines = outcome
        if isinstance(outcome, Exception) and is_unstable(cause_of(outcome)):
            # A slot that is on its way has some of the keys here and some there.
            single = [_renewal(keys, [renewals[i]]) for i in batch]
            lines = [reply[0] for reply in nodes.run_all(script, single, within)]
        elif isinstance(outcome, Exception) and within is None:
            (lines,) = nodes.run_all(script, [call])  # as long as it is worth to wait
        elif isinstance(outcome, Exception):
            raise translated(outcome, script)
        for index, line in zip(batch, lines, strict=True):
            kept[index] = line == 1
    return kept


def heartbeats(
    nodes: Nodes, keys: Keyspace, renewals: Sequence[Renewal], within: float | None
) -> list[Held | Queued | None]:
    """As `LockStore.heartbeat`."""
    batches = _batches(keys, renewals)
    calls: list[Call] = []
    for batch in batches:
        part = [renewals[i] for i in batch]
        meta = keys.meta(keys.bucket(part[0].name))
        args = [
            x for b in part for x in (b.execution_id, b.attempt_id, _text(b.wait), _text(b.lease))
        ]
        calls.append(([meta, *(keys.lock(beat.name) for beat in part)], args))
    answers: list[Held | Queued | None] = [None] * len(renewals)
    lines = nodes.run_all(sharded()["heartbeat"], calls, within)
    for batch, reply in zip(batches, lines, strict=True):
        for index, line in zip(batch, reply, strict=True):
            answers[index] = replies.beat(line)
    return answers


def _renewal(keys: Keyspace, part: Sequence[Renewal]) -> Call:
    locks = [keys.lock(beat.name) for beat in part]
    return locks, [
        x
        for b in part
        for x in (b.execution_id, b.attempt_id, _text(b.lease), str(int(b.longer)))
    ]


def _batches(keys: Keyspace, renewals: Sequence[Renewal]) -> list[list[int]]:
    """The indexes of the beats of each call: of one bucket, and not too many."""
    found: dict[int, list[int]] = {}
    for index, beat in enumerate(renewals):
        found.setdefault(keys.bucket(beat.name), []).append(index)
    every = found.values()
    return [part[start : start + BATCH] for part in every for start in range(0, len(part), BATCH)]
