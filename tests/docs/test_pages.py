"""Each code block of the documentation runs, in the order of its page, against a real Redis."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery, _state, chain, chord, group
from celery.result import allow_join_result

from celery_relock import Lock, LockedTask, errors, locked
from celery_relock.engine.hold import Hold
from celery_relock.errors import LockLost, RelockError
from celery_relock.settings import backend_settings, read_by_tasks
from tests.docs.pages import URL, all_pages, blocks, text
from tests.support import RedisServer
from tests.support.worker import ROOT

# Whose blocks are run by a test of their own.
ELSEWHERE = {"quickstart", "fencing", "metrics", "migrating", "redis", "testing"}
PAGES = [
    page
    for page in all_pages()
    if page not in ELSEWHERE and not page.startswith("recipes/") and blocks(page)
]


@pytest.fixture(scope="module")
def server(redis_binary: str) -> Iterator[RedisServer]:
    """A Redis of its own: the pages use the default namespace."""
    server = RedisServer(binary=redis_binary)
    yield server
    gc.collect()  # results say goodbye to Redis when they are collected, and try for long
    server.stop()


@pytest.fixture
def url(server: RedisServer) -> Iterator[str]:
    yield server.url.removesuffix("/0")
    with redis.Redis.from_url(server.url) as client:
        for database in (0, 1):
            client.select(database)
            client.flushdb()


@pytest.fixture
def names(url: str) -> Iterator[dict[str, Any]]:
    """What a page takes for granted: an app, and the names that its sentences have introduced."""
    before = set(_state._on_app_finalizers)  # Celery hands shared tasks to apps of other tests
    app = Celery("shop", broker=url, backend=url)
    plain = {name: app.task(_plain, name=name) for name in ("fetch", "parse", "store", "prepare")}
    more = {name: app.task(_plain, name=name) for name in ("part", "publish", "convert", "book")}
    yield {
        "app": app,
        "Lock": Lock,
        "LockedTask": LockedTask,
        "locked": locked,
        "chain": chain,
        "chord": chord,
        "group": group,
        "allow_join_result": allow_join_result,
        **plain,
        **more,
    }
    app.close()
    _state._on_app_finalizers.intersection_update(before)


def _plain(*_: Any) -> None:
    """Stands for work."""


def run(page: str, url: str, names: dict[str, Any]) -> dict[str, Any]:
    for number, block in enumerate(blocks(page)):
        exec(compile(block.replace(URL, url), f"docs/{page}.md, block {number}", "exec"), names)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs(page: str, url: str, names: dict[str, Any]) -> None:
    run(page, url, names)


def test_the_example_of_self_lock_sees_its_lock(url: str, names: dict[str, Any]) -> None:
    booked = []
    names = run("lock", url, names)
    names["entries_of"] = lambda account: ["rent", "food"]
    names["book"] = lambda entry, fence: booked.append((entry, fence))

    names["settle"](42)
    names["settle"](42)

    assert [entry for entry, _ in booked] == ["rent", "food"] * 2
    fences = [fence for _, fence in booked]
    assert 0 < fences[0] == fences[1] < fences[2] == fences[3]


def test_the_settings_of_the_page_are_read(url: str, names: dict[str, Any]) -> None:
    app = run("settings", url, names)["app"]

    found = backend_settings(app)
    assert (found.url, found.namespace, found.source) == (f"{url}/1", "shop", "relock_url")
    assert read_by_tasks(app) == {"ttl": 60}


def test_the_table_of_self_lock_has_each_attribute() -> None:
    public = {name for name in dir(Hold) if not name.startswith("_")} - {"lost_error"}
    table = text("lock").split("## Outside of tasks")[0]

    assert (
        set(re.findall(r"`(\w+)(?:\(.*?\))?`", "".join(re.findall(r"^\| .+? \|", table, re.M))))
        == public
    )


def test_every_error_has_a_page_and_a_row() -> None:
    classes = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, RelockError) and kind is not RelockError
    }
    assert LockLost.__name__ in classes
    assert {page.removeprefix("errors/") for page in all_pages() if page.startswith("errors/")} == {
        *classes,
        "index",
    }
    for name in classes:
        assert f"[`{name}`]({name}.md)" in text("errors/index")


@pytest.mark.parametrize("page", all_pages())
def test_the_tests_and_scripts_that_a_page_names_are_there(page: str) -> None:
    named = re.findall(r"(?:tests|scripts)/[\w/-]+(?:\.\w+)?", text(page))
    assert not [path for path in named if not (ROOT / path).exists()]
