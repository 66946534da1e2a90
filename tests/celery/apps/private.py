"""`make_app` for apps whose tasks stay their own.

Celery puts a task into every app of the process unless it says `shared=False`. A test process loads
these modules several times, each with an app of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Celery

from tests.support import make_app as make_plain_app


def make_app(name: str, **settings: Any) -> Celery:
    app = make_plain_app(name, **settings)
    app.task = partial(app.task, shared=False)
    return app
