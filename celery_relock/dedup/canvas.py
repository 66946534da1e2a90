"""Which messages Celery sends by itself: of a canvas, a link, a retry, a replaced task.

Somebody waits for the very id of each, so none is ever a duplicate.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

# With any of these Celery has made the call, or goes on from its result.
_OPTIONS = (
    *("task_id", "chain", "chord", "group_id", "link", "link_error"),
    *("retries", "replaced_task_nesting", "parent_id", "root_id"),
)

# Where Celery goes on from a task that has ended, also in a process that runs none.
_GOING_ON = ("_call_task_errbacks", "on_chord_part_return")
# What is Celery's own code below `trace_task`, and runs a body: `autoretry_for`, `map`, `starmap`.
_BODIES = ("__call__", "run", "xmap", "xstarmap")


def asks_for(options: Mapping[str, Any]) -> bool:
    """Whether these are the options of a call that somebody waits for."""
    return any(options.get(name) for name in _OPTIONS)


def goes_on() -> bool:
    """Whether Celery sends, by itself, what comes after a task: called while it is published.

    A step of a task that this process does not know is sent as by `send_task`, and nothing that
    Celery passes on tells one from the other. So the call stack does: what a body sends is sent
    below the call of that body.
    """
    called: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _GOING_ON:
            return True
        if frame.f_code.co_name == "trace_task" and _is_celerys(frame):
            return called is not None and _is_celerys(called) and not _is_body(called)
        frame, called = frame.f_back, frame
    return False


def _is_celerys(frame: FrameType) -> bool:
    module: str = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] == "celery"


def _is_body(frame: FrameType) -> bool:
    return frame.f_code.co_name in _BODIES


def is_member(message: Any) -> bool:
    """Whether a message that nobody has marked is no call of its own, by what it says."""
    own = (message.chain, message.chord, message.group, message.callbacks, message.errbacks)
    return any((*own, message.retries, message.replaced_task_nesting))
