"""The sender: `python -m tests.chaos.combined.sender`."""

from __future__ import annotations

import time

from celery_relock.errors import DuplicateTask
from tests.chaos.combined.app import app, leaves, send, tell, tell_sent, workload
from tests.chaos.combined.workload import Item


def _send(item: Item, prefix: str, number: int) -> None:
    try:
        result = send(item.node, prefix, item.options, item.by_name)
    except DuplicateTask:
        return
    tell_sent(result, item.number, prefix, number=number)
    if item.revoked:
        time.sleep(item.revoked_after)
        app.control.revoke(leaves(result), **item.revoked)


def main() -> None:
    number = 0
    for item in workload.items:
        for prefix in "pt":
            time.sleep(item.pause)
            for _ in range(item.times):
                number += 1
                _send(item, prefix, number)
    tell("all sent")


if __name__ == "__main__":
    main()
