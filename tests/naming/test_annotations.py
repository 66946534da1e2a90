"""A task's annotations are for type checkers: what they name need not be there (PEP 649)."""

# No `from __future__ import annotations` here, as nothing would be evaluated then.

import re
import sys
from typing import TYPE_CHECKING

import pytest
from celery import Celery

from celery_relock import LockedTask
from tests.support.worker import ROOT

if TYPE_CHECKING:
    from nowhere import Account  # type: ignore[import-not-found]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="this Python evaluates annotations at once")
def test_a_task_can_be_annotated_with_what_only_a_type_checker_sees():
    app = Celery(broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.relock_url = "memory://"

    def key(account: Account) -> str:
        return f"account:{account}"

    @app.task(base=LockedTask, shared=False, lock_key="account:{account}")
    def plain(account: Account, amount: int = 1) -> Account:
        return account

    @app.task(base=LockedTask, bind=True, shared=False, lock_key=key, lock_mode=lambda: "shared")
    def bound(self, account: Account, amount: int = 1) -> Account:
        return account

    for task in (plain, bound):
        assert task.lock_for(42).name == "account:42"
        assert task.apply((42,)).get() == 42


def test_signatures_are_read_in_one_place_which_looks_at_no_annotation():
    readers = [
        path.name
        for path in sorted((ROOT / "celery_relock").rglob("*.py"))
        if re.search(r"inspect\.(signature|getfullargspec|get_annotations)\(", path.read_text())
    ]

    assert readers == ["callables.py"]
