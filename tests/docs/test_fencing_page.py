"""docs/fencing.md is so: its code runs, its tables are those of the code."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import _state
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from celery_relock.contrib.sql import create_table
from celery_relock.errors import LockLost
from tests.docs.pages import URL, blocks
from tests.support.databases import Postgres
from tests.support.worker import ROOT

pytestmark = pytest.mark.slow

IN_A_TASK, IN_DJANGO, IN_ASYNCIO = blocks("fencing")


@pytest.fixture(autouse=True)
def _tasks_stay_here() -> Iterator[None]:
    """Celery hands the tasks of every app on to all that come later, in other tests as well."""
    before = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.intersection_update(before)


@pytest.fixture
def shop(postgres: Postgres) -> Postgres:
    with postgres.connect(autocommit=True) as connection:
        for table in ("relock_fence", "account"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
        connection.execute(create_table())
        connection.execute("CREATE TABLE account (id int PRIMARY KEY, balance int)")
        connection.execute("INSERT INTO account VALUES (42, 100)")
    return postgres


def run(block: str, redis_url: str, shop: Postgres) -> dict[str, Any]:
    names: dict[str, Any] = {}
    there = block.replace(URL, redis_url)
    exec(there.replace("postgresql://localhost/shop", shop.url), names)
    return names


def balance(shop: Postgres) -> int:
    with shop.connect() as connection:
        row = connection.execute("SELECT balance FROM account").fetchone()
    assert row is not None
    return int(row[0])


def see_a_higher_token(shop: Postgres, name: str) -> None:
    with psycopg.connect(shop.url) as connection:
        connection.execute("UPDATE relock_fence SET token = token * 2 WHERE name = %s", [name])


def test_a_task(redis_url: str, shop: Postgres) -> None:
    charge = run(IN_A_TASK, redis_url, shop)["charge"]
    charge(42, 30)
    see_a_higher_token(shop, "account:42")
    with pytest.raises(LockLost):
        charge(42, 30)

    assert balance(shop) == 70


def test_asyncio(redis_url: str, shop: Postgres) -> None:
    block = IN_ASYNCIO.replace(
        "...", 'await session.execute(text("UPDATE account SET balance = 1"))'
    )
    charge = run(f"from sqlalchemy import text\n{block}", redis_url, shop)["charge"]

    async def work() -> None:
        engine = create_async_engine(shop.url.replace("postgresql:", "postgresql+psycopg:"))
        try:
            async with AsyncSession(engine) as session:
                await charge(session, 42, 30)
        finally:
            await engine.dispose()

    asyncio.run(work())
    assert balance(shop) == 1
    see_a_higher_token(shop, "account:42")
    with psycopg.connect(shop.url) as connection:
        connection.execute("UPDATE account SET balance = 100")
    with pytest.raises(LockLost):
        asyncio.run(work())

    assert balance(shop) == 100


def test_django(redis_url: str, tmp_path: Path) -> None:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.sqlite")}
    pay = 'connection.cursor().execute("INSERT INTO payments VALUES (%s)", [amount])'
    block = IN_DJANGO.replace(URL, redis_url).replace("...", pay)
    done = subprocess.run(
        [sys.executable, "-m", "tests.contrib.apps.shop", json.dumps({"default": database}), block],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr

    assert json.loads(done.stdout)["default"]["charged"] == [7]


def test_the_tables() -> None:
    shown = [statement.strip() for statement in blocks("fencing", "sql")]

    assert shown == [create_table("postgresql"), create_table("mariadb")]
    assert create_table("sqlite") == create_table("postgresql")
    assert create_table("mysql") == create_table("mariadb")
