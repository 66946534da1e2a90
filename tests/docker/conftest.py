"""The smoke suite on pytest-celery: `scripts/smoke`, or SMOKE_NODES=docker scripts/smoke.

pytest-celery is a plugin of every pytest run of its environment, so it has one of its own; where it
is not installed, nothing of this folder is collected.
"""

from __future__ import annotations

import importlib.util
import os

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("pytest_celery") is None:
    collect_ignore_glob.append("test_*.py")
else:
    from tests.docker.setup import *  # noqa: F403


def pytest_report_header() -> str:
    return f"smoke suite on: {os.environ.get('SMOKE_NODES') or 'process'}"
