"""The library beside other software: `scripts/company`.

The other software has an environment of its own; where it is not installed, nothing of this folder
is collected.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest

from tests.company.bench import Bench, Company
from tests.company.companions import COMPANIONS
from tests.support import RedisServer
from tests.support.long import LONG

collect_ignore_glob: list[str] = ["inner/*"]
INSTALLED = all(map(importlib.util.find_spec, ("ddtrace", "flower", "moto", "newrelic")))
if not INSTALLED:
    collect_ignore_glob.append("test_*.py")

PAIRS = [
    pytest.param((companion, pool), id=f"{companion.name}, {pool}")
    for companion in COMPANIONS
    for pool in companion.pools[: None if LONG else 1]
]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup` all scenarios of one companion go to one process, to one worker.

    pytest-xdist 3.8 has marks for that, which do nothing with pytest 9.2.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByCompanion(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            found = re.search(r"\[(.+?, \w+)[-\]]", nodeid)
            return found.group(1) if found else nodeid

    return ByCompanion(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "beside(*names): only beside these companions")
    config.addinivalue_line("markers", "processes: needs child processes: kills, time limits")
    config.addinivalue_line("markers", "threads: only in a pool of threads")
    config.addinivalue_line("markers", "traces: only beside what carries traces")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what there is nothing to see of beside a companion."""
    config.hook.pytest_deselected(items=[item for item in items if not _fits(item)])
    items[:] = filter(_fits, items)


def _fits(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    if callspec is None or "company" not in callspec.params:
        return True
    companion, pool = callspec.params["company"]
    beside = item.get_closest_marker("beside")
    if beside is not None and companion.name not in beside.args:
        return False
    if item.get_closest_marker("traces") and not companion.traces:
        return False
    unfit = "threads" if pool == "prefork" else "processes"
    return not item.get_closest_marker(unfit)


def pytest_report_header() -> list[str]:
    if not INSTALLED:
        return ["company: not installed here; scripts/company runs its suite"]
    packages = dict.fromkeys(package for each in COMPANIONS for package in each.packages)
    return ["company: " + ", ".join(f"{package} {version(package)}" for package in packages)]


@pytest.fixture(scope="module", params=PAIRS)
def company(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Company]:
    """Each companion in each pool."""
    companion, pool = request.param
    opened = Company(companion, pool, redis_server.url, tmp_path_factory.mktemp("company"))
    yield opened
    opened.close()


@pytest.fixture
def bench(company: Company) -> Iterator[Bench]:
    opened = Bench(company)
    yield opened
    opened.finish()
