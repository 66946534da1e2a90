"""Fixtures for the tests of `lock_dedup`."""

from __future__ import annotations

from tests.celery.conftest import results_of_groups_are_looked_for_often  # noqa: F401
