"""Fixtures for all tests of workflow locks."""

from tests.celery.conftest import results_of_groups_are_looked_for_often as results_are_looked_for

__all__ = ["results_are_looked_for"]
