"""Fenced writes: a database that has seen a higher token refuses a lower one."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy
from celery import Celery
from psycopg import AsyncConnection
from psycopg.rows import class_row
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session

import celery_relock.asyncio
from celery_relock import Lock, LockedTask
from celery_relock.contrib.sql import create_table, fence
from celery_relock.engine.hold import Hold
from celery_relock.errors import LockConfigError, LockLost
from celery_relock.lock import LockNotTaken
from tests.contrib import frozen
from tests.support import RedisServer
from tests.support.databases import MariaDB, Postgres
from tests.support.worker import ROOT


class Way:
    """A way to talk to a database that has the tables.

    Args:
        dialect: of the database.
        connect: opens a connection for `with`; `autocommit=True` is passed on.
        session: makes of an SQLAlchemy connection what is given to `fence`.
    """

    def __init__(
        self,
        dialect: str,
        connect: Callable[..., Any],
        session: Callable[[Any], Any] = lambda connection: connection,
    ) -> None:
        self._connect, self._session = connect, session
        with self.autocommit() as connection:
            for table in ("relock_fence", "payments"):
                execute(connection, f"DROP TABLE IF EXISTS {table}")
            execute(connection, create_table(dialect))
            execute(connection, "CREATE TABLE payments (amount integer)")

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        with closing(self._connect()) as connection:
            yield self._session(connection)
            connection.commit()

    def autocommit(self) -> AbstractContextManager[Any]:
        return closing(self._connect(autocommit=True))

    def payments(self) -> list[int]:
        with self.transaction() as connection:
            return [amount for (amount,) in execute(connection, "SELECT amount FROM payments")]


def execute(connection: Any, statement: str) -> Any:
    if isinstance(connection, sqlalchemy.Connection | Session | scoped_session):
        result = connection.execute(sqlalchemy.text(statement))
        return result.all() if result.returns_rows else []
    with closing(connection.cursor()) as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


def pay(connection: Any, amount: int) -> None:
    execute(connection, f"INSERT INTO payments VALUES ({amount})")


def by_sqlalchemy(url: str) -> Callable[..., sqlalchemy.Connection]:
    def connect(autocommit: bool = False) -> sqlalchemy.Connection:
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
        return engine.connect().execution_options(**options)

    return connect


# What is made of a connection of SQLAlchemy, for `fence`.
GIVEN: dict[str, Callable[[Any], Any]] = {
    "a Session": Session,
    "a scoped_session on pg8000": lambda connection: scoped_session(lambda: Session(connection)),
}


@pytest.fixture(params=["psycopg", "SQLAlchemy on PostgreSQL", "SQLAlchemy on pg8000",
                        *GIVEN, "PyMySQL", "SQLAlchemy on MariaDB", "sqlite3",
                        "SQLAlchemy on SQLite"])  # fmt: skip
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    which, file = request.param, tmp_path / "shop.sqlite"
    if which == "sqlite3":
        return Way(
            "sqlite",
            lambda autocommit=False: sqlite3.connect(
                file, timeout=0.05, isolation_level=None if autocommit else "DEFERRED"
            ),
        )
    if which == "SQLAlchemy on SQLite":
        return Way("sqlite", by_sqlalchemy(f"sqlite:///{file}?timeout=0.05"))
    if which in ("PyMySQL", "SQLAlchemy on MariaDB"):
        server: MariaDB = request.getfixturevalue("mariadb")
        if which == "PyMySQL":
            options = {"database": "shop", "init_command": "SET innodb_lock_wait_timeout = 0"}
            return Way("mariadb", lambda **more: server.connect(**options, **more))
        return Way("mariadb", by_sqlalchemy(f"mysql+pymysql://root@127.0.0.1:{server.port}/shop"))
    database: Postgres = request.getfixturevalue("postgres")
    if which == "psycopg":
        limit = {"options": "-c lock_timeout=50"}
        return Way("postgresql", lambda **more: database.connect(**limit, **more))
    driver = "pg8000" if "pg8000" in which else "psycopg"
    connect = by_sqlalchemy(database.url.replace("postgresql:", f"postgresql+{driver}:"))
    return Way("postgresql", connect, GIVEN.get(which, lambda connection: connection))


def test_only_the_highest_token_of_a_lock_may_write(way: Way) -> None:
    with way.transaction() as connection:
        fence(connection, "account:42", 2)
        fence(connection, "account:42", 2)  # re-entered
        pay(connection, 1)
    with way.transaction() as connection:
        fence(connection, "account:42", 1795347980519957)
        pay(connection, 2)
    with way.transaction() as connection:
        pay(connection, 3)
        with pytest.raises(LockLost, match=r"'account:42'.*higher"):
            fence(connection, "account:42", 1795347980519956)
        connection.rollback()

    assert way.payments() == [1, 2]


def test_names_are_told_apart_by_case_and_to_their_end(way: Way) -> None:
    long = "account:" + "é" * 300
    for token, name in enumerate(["Account", "account", "account ", f"{long}1", f"{long}2"], 1):
        with way.transaction() as connection:
            fence(connection, name, 10 - token)
    with way.transaction() as connection, pytest.raises(LockLost):
        fence(connection, f"{long}1", 5)


def test_without_a_transaction_it_is_refused(way: Way) -> None:
    with way.autocommit() as connection, pytest.raises(LockConfigError, match="autocommit"):
        fence(connection, "account:42", 1)


def test_a_commit_inside_the_block_is_refused(way: Way, lock: Callable[[], Lock]) -> None:
    with (
        lock() as held,
        way.transaction() as connection,
        pytest.raises(LockConfigError, match="ended inside"),
        held.fenced(connection),
    ):
        connection.commit()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize(("mode", "said"), [("AUTOCOMMIT", "autocommit"), (None, "ended inside")])
def test_in_coroutines_autocommit_and_a_commit_inside_the_block_are_refused(
    postgres: Postgres, redis_url: str, namespace: str, driver: str, mode: str | None, said: str
) -> None:
    Way("postgresql", postgres.connect)
    url = postgres.url.replace("postgresql:", f"postgresql+{driver}:")

    async def commit_inside() -> None:
        engine = create_async_engine(url, poolclass=sqlalchemy.NullPool)
        async with (
            celery_relock.asyncio.Lock(redis_url, "account:42", namespace=namespace) as held,
            engine.connect() as connection,
        ):
            if mode:
                await connection.execution_options(isolation_level=mode)
            with pytest.raises(LockConfigError, match=said):
                async with held.fenced(connection):
                    await connection.commit()

    asyncio.run(commit_inside())


def test_a_driver_that_does_not_tell_of_transactions_is_refused() -> None:
    class Silent(sqlite3.Connection):
        @property
        def in_transaction(self) -> bool:
            raise AttributeError

    with closing(sqlite3.connect(":memory:", factory=Silent)) as connection:
        connection.execute(create_table("sqlite"))
        with pytest.raises(LockConfigError, match="does not tell"):
            fence(connection, "account:42", 1)


def test_a_transaction_that_began_inside_the_block_is_checked_at_its_end(
    way: Way, lock: Callable[[], Lock]
) -> None:
    def write(held: Lock, first: int, newer_token: int = 0) -> None:
        with way.transaction() as connection, held.fenced(connection):
            pay(connection, first)
            connection.commit()
            if newer_token:
                with way.transaction() as newer:
                    fence(newer, "account:42", newer_token)
            pay(connection, first + 1)

    with lock() as held:
        write(held, 1)
        with pytest.raises(LockLost):
            write(held, 3, held.fence + 1)

    assert way.payments() == [1, 2, 3]


@pytest.mark.parametrize("way", ["psycopg", "PyMySQL", "sqlite3"], indirect=True)
def test_until_a_transaction_ends_nobody_with_another_token_goes_on(way: Way) -> None:
    busy = (
        psycopg.errors.LockNotAvailable,
        pymysql.err.OperationalError,
        sqlite3.OperationalError,
    )
    with way.transaction() as old:
        fence(old, "account:42", 1)
        with pytest.raises(busy), way.transaction() as new:
            fence(new, "account:42", 2)
        pay(old, 1)
    with way.transaction() as new:
        fence(new, "account:42", 2)

    assert way.payments() == [1]


class Payment:
    def __init__(self, amount: int) -> None:
        self.amount = amount


CURSORS = (psycopg.Cursor, psycopg.ClientCursor, *filter(None, [getattr(psycopg, "RawCursor", 0)]))


@pytest.mark.parametrize("way", ["psycopg"], indirect=True)
@pytest.mark.parametrize("in_a_pipeline", [False, True])
@pytest.mark.parametrize("cursors", CURSORS)
def test_whatever_cursors_and_rows_a_connection_of_psycopg_makes(
    way: Way, postgres: Postgres, cursors: Any, in_a_pipeline: bool
) -> None:
    def see(token: int, *amounts: int, **options: Any) -> None:
        with (
            postgres.connect(
                cursor_factory=cursors, row_factory=class_row(Payment), **options
            ) as connection,
            connection.pipeline() if in_a_pipeline else nullcontext(),
        ):
            for amount in amounts:
                pay(connection, amount)
            fence(connection, "account:42", token)

    see(5, 1)
    see(5, 2)
    see(7)
    with pytest.raises(LockLost):
        see(6, 3, 4)
    with pytest.raises(LockConfigError, match="autocommit"):
        see(8, autocommit=True)

    assert way.payments() == [1, 2]


@pytest.mark.parametrize("way", ["SQLAlchemy on PostgreSQL"], indirect=True)
def test_what_sqlalchemy_does_not_tell_in_a_pipeline_is_no_loss(way: Way) -> None:
    with way.transaction() as connection:
        driver = connection.connection.driver_connection
        with driver.pipeline():
            with pytest.raises(LockConfigError, match="the connection of psycopg"):
                fence(connection, "account:42", 1)
            fence(driver, "account:42", 1)


def test_a_session_for_several_databases_is_told_to_give_the_connection(database: Way) -> None:
    class Base(DeclarativeBase):
        pass

    class Payment(Base):
        __tablename__ = "payments"
        amount: Mapped[int] = mapped_column(primary_key=True)

    engine = sqlalchemy.create_engine("sqlite://", creator=database._connect)
    with Session(binds={Payment: engine}) as session:
        with pytest.raises(LockConfigError, match=r"session\.connection\(bind_arguments="):
            fence(session, "account:42", 2)
        session.add(Payment(amount=1))
        session.flush()
        fence(session.connection(bind_arguments={"mapper": Payment}), "account:42", 2)
        session.commit()
        fence(session.connection(bind_arguments={"mapper": Payment}), "account:42", 2)
        with pytest.raises(LockLost):
            fence(session.connection(bind_arguments={"mapper": Payment}), "account:42", 1)
        session.rollback()
    engine.dispose()

    assert database.payments() == [1]


@pytest.fixture
def lock(redis_url: str, namespace: str) -> Callable[..., Lock]:
    def make(**options: Any) -> Lock:
        return Lock(redis_url, "account:42", namespace=namespace, **options)

    return make


@pytest.fixture
def database(tmp_path: Path) -> Way:
    return Way("sqlite", lambda **_: sqlite3.connect(tmp_path / "shop.sqlite"))


def test_a_lock_that_is_lost_inside_the_block_commits_nothing(
    database: Way, lock: Callable[..., Lock]
) -> None:
    def write(held: Lock) -> None:
        with database.transaction() as connection, held.fenced(connection):
            pay(connection, 1)
            held._engine.backend.force_release("account:42")
            with suppress(LockLost):
                held.extend(1.0)  # so it knows

    with lock(raise_on_release_error=False) as held, pytest.raises(LockLost):
        write(held)

    assert database.payments() == []


def test_namespaces_share_the_row_of_a_lock_name(database: Way) -> None:
    """Too strict for two programs, but a program whose namespace changes goes on where it was."""
    shop, billing = (Lock("memory://", "account:42", namespace=n) for n in ("shop", "billing"))
    with shop:
        with billing, database.transaction() as connection, billing.fenced(connection):
            pay(connection, 1)
        with (
            database.transaction() as connection,
            pytest.raises(LockLost, match="higher"),
            shop.fenced(connection),
        ):
            pay(connection, 2)

    assert database.payments() == [1]


def test_what_is_not_held_or_has_several_holders_is_not_fenced(
    database: Way, lock: Callable[..., Lock]
) -> None:
    with database.transaction() as connection:
        with pytest.raises(LockNotTaken):
            lock().fenced(connection)
        with pytest.raises(LockLost, match="not held"):
            fence(connection, "account:42", lock().fence)
        with (
            lock(limit=2) as several,
            pytest.raises(LockConfigError, match="2 permits"),
            several.fenced(connection),
        ):
            raise AssertionError("inside")


def make_app(url: str, namespace: str) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(relock_url=url, relock_namespace=namespace)
    return app


def test_a_task_fences_all_its_locks(database: Way, redis_url: str, namespace: str) -> None:
    app = make_app(redis_url, namespace)

    @app.task(shared=False, base=LockedTask, bind=True, lock_key=["from:{a}", "to:{b}"])
    def transfer(self: Any, a: int, b: int) -> dict[str, int]:
        with database.transaction() as connection, self.lock.fenced(connection):
            pay(connection, a)
        return dict(self.lock.fences)

    fences = transfer(1, 2)

    with database.transaction() as connection:
        seen = execute(connection, "SELECT name, token FROM relock_fence")
    assert dict(seen) == fences
    with database.transaction() as connection, pytest.raises(LockLost, match="to:2"):
        fence(connection, "to:2", fences["to:2"] - 1)


def test_a_lock_in_a_task_fences_its_own_name_whatever_the_limit_of_the_others(
    database: Way, redis_url: str, namespace: str
) -> None:
    app, names = make_app(redis_url, namespace), ["account:{a}", "pool:{a}"]

    @app.task(shared=False, base=LockedTask, lock_key=names, lock_limit=[1, 5])
    def charge(a: int) -> None:
        def fenced(name: str) -> None:
            with (
                Lock(redis_url, f"{name}:{a}", namespace=namespace) as lock,
                database.transaction() as connection,
                lock.fenced(connection),
            ):
                pay(connection, a)

        fenced("account")
        with pytest.raises(LockConfigError, match="pool:1: a lock with 5 permits"):
            fenced("pool")

    charge(1)
    assert database.payments() == [1]


def test_a_task_fences_what_it_has_re_entered_whatever_the_limit_of_its_callers_other_locks(
    database: Way, redis_url: str, namespace: str
) -> None:
    app, names = make_app(redis_url, namespace), ["account:{a}", "pool:{a}"]

    @app.task(shared=False, base=LockedTask, bind=True, lock_key="account:{a}")
    def book(self: Any, a: int) -> None:
        with database.transaction() as connection, self.lock.fenced(connection):
            pay(connection, a)

    @app.task(shared=False, base=LockedTask, lock_key=names, lock_limit=[1, 5])
    def charge(a: int) -> None:
        book(a)

    charge(1)
    assert database.payments() == [1]


@pytest.fixture
def sqlite() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as connection:
        yield connection


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_without_the_table_the_error_says_how_to_make_it(sqlite: sqlite3.Connection) -> None:
    sqlite.execute("BEGIN")
    with pytest.raises(sqlite3.OperationalError) as missing:
        fence(sqlite, "account:42", 1)
    assert "manage.py migrate" in missing.value.__notes__[0]


def test_who_goes_on_without_a_lock_fences_nothing(sqlite: sqlite3.Connection) -> None:
    with pytest.raises(LockLost, match="no lock is held"):
        Hold("somebody", ()).fenced(sqlite3)
    with pytest.raises(LockLost, match="relock_enabled=False"):
        fence(sqlite, "account:42", 0)


def test_what_is_no_connection_is_told_what_would_be_one(sqlite: sqlite3.Connection) -> None:
    with pytest.raises(LockConfigError, match=r"SQLAlchemy.* not builtins\.object"):
        fence(object(), "account:42", 1)
    with pytest.raises(LockConfigError, match=r"not psycopg\.\S*AsyncConnection"):
        fence(AsyncConnection.__new__(AsyncConnection), "account:42", 1)
    with pytest.raises(LockConfigError, match=r"run_sync\(fence"):
        fence(create_async_engine("postgresql+psycopg://").connect(), "account:42", 1)
    with pytest.raises(LockConfigError, match=r"sqlite3\.Cursor, a cursor: give its connection"):
        fence(sqlite.cursor(), "account:42", 1)
    with pytest.raises(LockConfigError, match="oracle"):
        create_table("oracle")


@pytest.mark.parametrize(
    ("name", "token"), [("account:42", None), ("account:42", "7"), (b"account:42", 7), (7, "a")]
)
def test_what_is_no_name_or_no_token_is_refused(
    sqlite: sqlite3.Connection, name: Any, token: Any
) -> None:
    with pytest.raises(LockConfigError, match=r"lock\.name and lock\.fence") as refused:
        fence(sqlite, name, token)
    assert repr(name) in str(refused.value)
    assert repr(token) in str(refused.value)


def test_a_frozen_holder_loses_updates_and_with_the_fence_none(
    redis_server: RedisServer, postgres: Postgres
) -> None:
    options = {"updates": 16, "freeze_each": 5, "registers": 1, "workers": 2}
    alone = frozen.campaign(redis_server.url, postgres, "lock alone", **options)
    with_fence = frozen.campaign(redis_server.url, postgres, "fence", **options)

    assert alone["freezes"]
    assert alone["lost updates"]
    assert with_fence["freezes"]
    assert with_fence["lost updates"] == 0


def test_the_row_is_locked_although_the_servers_default_engine_has_no_transactions(
    mariadb: MariaDB,
) -> None:
    """In a table of such an engine, two transactions were let through side by side."""
    by = {"init_command": "SET default_storage_engine = Aria, innodb_lock_wait_timeout = 0"}
    way = Way("mariadb", lambda **more: mariadb.connect(database="shop", **by, **more))
    with way.transaction() as old:
        fence(old, "account:42", 1)
        with pytest.raises(pymysql.err.OperationalError), way.transaction() as new:
            fence(new, "account:42", 2)


def test_in_django_the_table_comes_by_migration(
    postgres: Postgres, mariadb: MariaDB, tmp_path: Path
) -> None:
    engine, there = "django.db.backends.", {"HOST": "127.0.0.1"}
    with closing(postgres.connect(autocommit=True)) as connection:
        connection.execute("CREATE DATABASE django")
    with closing(mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE django")
    databases = {
        "default": {"ENGINE": f"{engine}sqlite3", "NAME": str(tmp_path / "shop.sqlite")},
        "postgres": {"ENGINE": f"{engine}postgresql", "NAME": "django", "USER": "relock",
                     "PORT": postgres.port, **there},
        "mariadb": {"ENGINE": f"{engine}mysql", "NAME": "django", "USER": "root",
                    "PORT": mariadb.port, **there},
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.contrib.apps.shop", json.dumps(databases)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr

    for found in json.loads(done.stdout).values():
        assert found["an older token"] == "LockLost"
        assert found["outside of atomic"] == "LockConfigError"
        assert found["payments"] == [20]
        assert "relock_fence" not in found["tables"]
