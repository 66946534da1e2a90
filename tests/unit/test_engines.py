"""The engines of a process: as many as there are ways to a Redis, and no longer than those."""

from __future__ import annotations

import gc
import weakref
from traceback import walk_tb
from typing import Any

import pytest
import redis
from celery import Celery

import celery_relock
import celery_relock.asyncio
from celery_relock import LockedTask, engines
from celery_relock.admin import Locks
from celery_relock.engines import MOST_URLS, engine_for
from celery_relock.errors import LockConfigError
from tests.support import wait_for


class Vault(redis.CredentialProvider):
    """Each client has one of its own."""

    def get_credentials(self) -> tuple[str, str]:
        return "locks", "s3cret"


def _wait_until_gone(*gone: weakref.ref[Any]) -> None:
    def are_gone() -> bool:
        gc.collect()  # does nothing while another thread collects
        return not any(each() for each in gone)

    wait_for(are_gone)


def test_an_engine_goes_with_the_last_of_its_clients() -> None:
    one, two = (redis.Redis(host="h", client_name="own") for _ in "12")
    kept = weakref.ref(engine_for(one))
    assert engine_for(two) is kept()
    del one
    gc.collect()
    assert kept() is engine_for(two)
    del two
    _wait_until_gone(kept)


def test_clients_that_come_and_go_leave_nothing() -> None:
    gc.collect()
    before = len(engines._engines)
    for _ in range(50):
        engine_for(redis.Redis(host="h", credential_provider=Vault()))
    gc.collect()
    assert len(engines._engines) == before


def test_the_engines_of_urls_have_a_bound() -> None:
    first = engine_for("redis://first")
    for number in range(2 * MOST_URLS):
        engine_for(f"redis://h{number}")
        assert engine_for("redis://first") is first, "what is in use is kept"
    assert len(engines._by_url) == MOST_URLS


def test_a_method_that_makes_clients_is_called_once_for_its_object() -> None:
    made: list[object] = []

    class Clients:
        def one(self) -> redis.Redis:
            made.append(self)
            return redis.Redis(host="h", credential_provider=Vault())

        @classmethod
        def other(cls) -> redis.Redis:
            made.append(cls)
            return redis.Redis(host="h", credential_provider=Vault())

    first, second = Clients(), Clients()
    engine = engine_for(first.one)
    assert engine_for(first.one) is engine
    assert engine_for(second.one) is engine_for(second.one) is not engine
    assert engine_for(Clients.other) is engine_for(Clients.other) is not engine
    assert made == [first, second, Clients]
    made.clear()
    kept = weakref.ref(engine)
    del first, engine
    _wait_until_gone(kept)


def test_functions_that_could_not_connect_leave_nothing() -> None:
    class Clients:
        def one(self) -> redis.Redis:
            raise redis.ConnectionError("no cluster")

    def function() -> redis.Redis:
        raise redis.ConnectionError("no cluster")

    first, second = Clients(), Clients()
    kept = [engine_for(each) for each in (function, first.one, second.one)]
    assert [engine_for(each) for each in (function, first.one, second.one)] == kept
    assert len(set(kept)) == 3
    gone = [weakref.ref(each) for each in (*kept, function, first, second)]
    del kept, function, first, second
    _wait_until_gone(*gone)


@pytest.mark.parametrize("place", ["redis://:s3cret@h", redis.Redis(host="h", password="s3cret")])
def test_no_password_stands_in_the_module(place: object) -> None:
    engine = engine_for(place)
    shown = f"{dict(engines._engines)} {engines._by_url} {dict(engines._by_client)}"
    assert engine.backend.id
    assert "s3cret" not in shown.replace(repr(getattr(place, "connection_pool", "")), "")


def _shown(error: BaseException) -> str:
    """What a crash reporter prints of an error: its text, and the locals of our frames."""
    chain = [error, *filter(None, (error.__cause__, error.__context__))]
    frames = [frame for each in chain for frame, _ in walk_tb(each.__traceback__)]
    ours = [f for f in frames if f.f_globals["__name__"].startswith("celery_relock")]
    assert ours
    return repr([*chain, *map(str, chain), *(list(frame.f_locals.values()) for frame in ours)])


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:s3cret@h:1/0?socket_timeout=-1",
        "redis://u:s3cret@h:1/0?credential_provider=no.such",
        "redis://u:s3cret@h:1/abc",
        "redis://u:s3cret@h:port/0",
        "redis://u:s3cret#x@h:1/0",
        "rediss://u:s3cret@h:1/0?ssl_ca_certs=/no/such/file",
        "sentinel://u:s3cret@h:1/0",
        "redis+cluster://u:s3cret@h:1/3",
        "http://u:s3cret@h:1/0",
    ],
)
def test_no_local_variable_of_a_refused_url_shows_its_password(url: str) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.relock_url = url

    @app.task(base=LockedTask, lock_key="a", shared=False)
    def book() -> None:
        pass

    for use in (lambda: celery_relock.Lock(url, "a"), lambda: Locks(url), book):
        with pytest.raises(LockConfigError) as caught:
            use()
        assert "s3cret" not in _shown(caught.value)


def test_no_local_variable_of_a_refused_setting_shows_a_password() -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.update(relock_url="redis://u:s3cret@h:1/0", relock_tll=5)

    def book() -> None:
        pass

    with pytest.raises(LockConfigError) as caught:
        app.task(base=LockedTask, lock_key="a", lazy=False)(book)
    assert "s3cret" not in _shown(caught.value)


def test_another_password_is_another_engine() -> None:
    one, two = (engine_for(redis.Redis(host="h", password=word)) for word in ("a", "b"))
    assert one is not two
    assert one.backend == two.backend, "but the locks are the same"


@pytest.mark.parametrize("kind", [celery_relock.Lock, celery_relock.asyncio.Lock])
def test_a_task_is_not_called_as_a_function_that_returns_a_client(kind: type) -> None:
    app, ran = Celery("shop", set_as_current=False), []

    @app.task(shared=False, base=LockedTask, lock_key="a")
    def book() -> None:
        ran.append(1)

    for one in (book, book.s()):
        with pytest.raises(LockConfigError, match=r"a Celery task.*task\.lock_for\(…\)"):
            kind(one, "a")
    assert not ran
