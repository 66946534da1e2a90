"""What children of the prefork pool are told that are spawned, and not forked
(`worker_pool_start_method="spawn"`).

A forked child has a copy of all that the worker's main process has set up. A spawned one is a new
interpreter, for which Celery makes the app anew: from its settings and its fixups, each of which it
calls with the new app.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def hand_on(app: Any, begin: Callable[..., None], *told: Any) -> None:
    """Have `begin(*told, app)` called in each child that is spawned from now on, before it has its
    tasks. What `begin` was told for an earlier worker of the app is forgotten."""
    others = [each for each in app.fixups if getattr(each, "func", None) is not begin]
    app.fixups = [*others, partial(begin, *told)]
