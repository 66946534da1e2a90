"""Fixtures for all tests of tasks and workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery.result import ResultSet


@pytest.fixture(scope="session", autouse=True)
def results_of_groups_are_looked_for_often() -> Iterator[None]:
    """Celery looks for those of a group each half second, which is most of the time of a test that
    asks for some. Those of single tasks it is told of."""
    get = ResultSet.get

    def get_soon(
        self: Any, timeout: Any = None, propagate: bool = True, interval: float = 0.02, **more: Any
    ) -> Any:
        return get(self, timeout, propagate, interval, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResultSet, "get", get_soon)
        yield
