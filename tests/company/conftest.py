"""The library beside other software: `scripts/company`.

The other software has an environment of its own; where it is not installed, nothing of this folder
is collected.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tests.company.bench import Bench, Company
from tests.company.companions import COMPANIONS
from tests.support import RedisServer
from tests.support.long import LONG

collect_ignore_glob: list[str] = ["inner/*"]
if any(importlib.util.find_spec(name) is None for name in ("ddtrace", "flower", "newrelic")):
    collect_ignore_glob.append("test_*.py")

PAIRS = [
    pytest.param(
        (companion, pool),
        id=f"{companion.name}, {pool}",
        # One worker for all its scenarios, also when pytest-xdist deals them out.
        marks=pytest.mark.xdist_group(f"{companion.name}, {pool}"),
    )
    for companion in COMPANIONS
    for pool in companion.pools[: None if LONG else 1]
]


def pytest_report_header() -> list[str]:
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
