"""Giving a lock back when a task is done, whatever happens to the process meanwhile."""

from __future__ import annotations

import logging
from contextlib import suppress

from celery.exceptions import SoftTimeLimitExceeded

from ..engine import events
from ..engine.engine import Engine
from ..engine.lease import Lease, State

logger = logging.getLogger("celery_relock")


def give_back(engine: Engine, lease: Lease, *, ended: bool) -> None:
    """Release, whatever comes: the task's own outcome stands."""
    held = lease.state in (State.HELD, State.LOST)
    try:
        engine.release(lease, ended=ended)
    except BaseException as error:
        if events.is_thrown_in(error):
            # The lock goes first: a process that is told to end has nobody left to do it.
            with suppress(Exception):
                engine.release(lease, ended=ended)
            if isinstance(error, SoftTimeLimitExceeded):
                return  # the body had its outcome before the limit
            raise
        logger.log(
            logging.WARNING if held else logging.DEBUG,
            "the lock %s could not be given back, its lease ends it within %.0f s: %s",
            ", ".join(map(repr, lease.claim.names)),
            lease.claim.lease,
            error,
        )
