"""The errors: the documented tree, and the way across process borders with all they carry."""

from __future__ import annotations

import copy
import pickle
import re
import sys

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.utils.serialization import get_pickleable_exception
from redis.exceptions import LockError, LockNotOwnedError

import celery_relock.lock
import celery_relock.task
from celery_relock import errors
from celery_relock.errors import LockConflict, LockLost, RelockError
from tests.support.programs import said_by
from tests.support.worker import ROOT


def _every(kind: type[RelockError]) -> list[type[RelockError]]:
    own = kind.__module__.startswith("celery_relock") and kind.__name__[0] != "_"
    below = [each for child in kind.__subclasses__() for each in _every(child)]
    return [kind, *below] if own else below


EVERY = _every(RelockError)


def _full(kind: type[RelockError]) -> RelockError:
    error = kind("account:42 is held", name="account:42", owner="Ann", remaining=1.5)
    error.note = {"seen": ["by", "a", "subclass"]}
    return error


def _same(one: BaseException, other: BaseException) -> bool:
    return type(one) is type(other) and one.args == other.args and one.__dict__ == other.__dict__


class WithArgumentsOfItsOwn(LockConflict):
    def __init__(self, account: int, *, teller: str):
        super().__init__(f"account {account} is with {teller}", name=f"account:{account}")
        self.account = account


def test_the_tree_in_the_docstring_is_the_tree():
    drawn: list[tuple[str, str | None]] = []
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        if found := re.match(r"^    ([ │├└─]*)([A-Z]\w+)", line):
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            drawn.append((found[2], path[depth - 1] if depth else None))
    real = {
        (name, None if kind is RelockError else kind.__base__.__name__)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, RelockError)
    }

    assert len(drawn) >= 6
    assert set(drawn) == real


def test_the_errors_of_lock_are_those_that_a_user_of_redis_py_expects():
    assert len(EVERY) >= 9
    assert issubclass(celery_relock.lock.LockNotAcquired, LockConflict)
    assert issubclass(celery_relock.lock.LockNotAcquired, LockError)
    assert issubclass(celery_relock.lock.LockNotOwned, LockLost)
    assert issubclass(celery_relock.lock.LockNotOwned, LockNotOwnedError)


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
class TestEveryError:
    def test_shows_its_message_and_carries_who_and_how_long(self, kind):
        error = _full(kind)

        assert error.reason == "account:42 is held"
        assert str(error) == f"{error.reason} ({error.page})"
        assert (
            (ROOT / "docs" / error.page.split("/en/")[1].partition("/")[2])
            .with_suffix(".md")
            .exists()
        )
        assert (error.name, error.owner, error.remaining) == ("account:42", "Ann", 1.5)
        assert (kind("plain").name, kind("plain").owner, kind("plain").remaining) == (None,) * 3

    def test_its_repr_is_its_text_as_a_worker_logs_it(self, kind):
        assert repr(_full(kind)) == f"{kind.__name__}('account:42 is held')"

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_pickles_with_all_its_attributes(self, kind, protocol):
        error = _full(kind)

        assert _same(pickle.loads(pickle.dumps(error, protocol)), error)
        assert _same(copy.copy(error), error)

    def test_crosses_from_a_pool_process_to_the_worker_as_billiard_sends_it(self, kind):
        error = _full(kind)
        try:
            raise error
        except RelockError:
            sent = pickle.dumps(ExceptionInfo(sys.exc_info()))

        assert _same(pickle.loads(sent).exception, error)

    def test_is_sent_by_celery_as_itself_and_not_as_a_wrapper(self, kind):
        assert get_pickleable_exception(error := _full(kind)) is error

    def test_comes_out_of_a_json_result_backend_as_it_went_in(self, kind):
        backend = Celery(backend="cache+memory://", set_as_current=False).backend
        stored = backend.prepare_exception(_full(kind), "json")

        back = backend.exception_to_python(backend.decode(backend.encode(stored)))
        assert type(back) is kind
        assert back.reason == "account:42 is held"
        assert (back.name, back.owner, back.remaining) == ("account:42", "Ann", 1.5)


def test_a_subclass_with_arguments_of_its_own_pickles_too():
    error = WithArgumentsOfItsOwn(42, teller="Ann")

    assert _same(pickle.loads(pickle.dumps(error)), error)
    assert error.account == 42


_FROZEN = """
import importlib.metadata
importlib.metadata.MetadataPathFinder.find_distributions = classmethod(lambda *_, **__: iter(()))
import sys
sys.modules["sentry_sdk.integrations.celery"] = sys  # as if it were loaded
from celery_relock.errors import LockConflict
from celery_relock.worker import company
print(LockConflict("it is held").page)
print(*company.tracers())
"""


def test_a_frozen_program_that_has_no_metadata_of_its_packages_can_show_an_error():
    page, tracer = said_by(_FROZEN).splitlines()
    assert page == LockConflict("it is held").page
    assert tracer == "sentry-sdk of an unknown version"
