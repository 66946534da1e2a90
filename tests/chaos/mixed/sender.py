"""The sender: `python -m tests.chaos.mixed.sender <calls> <seed> <pause>`."""

from __future__ import annotations

import random
import sys
import time

from celery import Signature
from celery.result import GroupResult

from tests.chaos.mixed.app import CALLS, KEYS, Call, app, tell


def send(kind: str, call: Call, made: Signature) -> None:
    result = made.apply_async(**call.options())
    members = result.results if isinstance(result, GroupResult) else [result]
    for each in members:
        alone = type(made) is Signature
        told = {"ends": call.ends, "retries": call.retries, "alone": alone}
        tell("sent", task=each.id, kind=kind, **told)
    if call.revoked:
        app.control.revoke(result.id)


def main() -> None:
    calls, seed, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    chance = random.Random(seed)
    kinds: list[str] = []
    for number in range(calls):
        if not kinds:
            kinds = chance.sample([*CALLS], len(CALLS))
        kind = kinds.pop()
        call = CALLS[kind]
        key, other = chance.sample(KEYS, 2)
        for _ in range(call.times):
            send(kind, call, call.made(key, other, number))
        time.sleep(chance.expovariate(1 / pause))
    tell("all sent")


if __name__ == "__main__":
    main()
