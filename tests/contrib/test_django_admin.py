"""The page in Django's admin, over HTTP, beside a worker: who sees it, who may free, its log."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from html import unescape
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urljoin
from urllib.request import HTTPCookieProcessor, Request, build_opener

import pytest
from celery import states

from celery_relock import Lock
from celery_relock.admin import Locks
from celery_relock.admin.names import shown as as_shown
from celery_relock.declaration import engine_of
from celery_relock.engine.protocol import SHARED, Claim, Release
from celery_relock.errors import LockLost
from tests.support import Worker, wait_for
from tests.support.worker import ROOT, environment_of

LOCKS = "/admin/celery_relock/lock/"
NAME = 'order:<b>"1/2"&ü'


class Browser:
    """A user's, with cookies; forms are sent as they stand on the page."""

    def __init__(self, port: int, user: str) -> None:
        self._at = f"http://127.0.0.1:{port}"
        self._opener = build_opener(HTTPCookieProcessor(CookieJar()))
        self.text = ""
        self.status = self.get("/admin/login/")
        self.post("/admin/login/", username=user, password="secret", next=LOCKS)

    def get(self, path: str) -> int:
        return self._open(Request(self._at + path))

    def post(self, path: str, *, token: str | None = None, **fields: str) -> int:
        """Send a form with the CSRF token of the page that was opened last."""
        (found,) = set(re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', self.text)) or {""}
        data = {"csrfmiddlewaretoken": found if token is None else token, **fields}
        return self._open(Request(self._at + path, urlencode(data).encode()))

    def _open(self, request: Request) -> int:
        try:
            with self._opener.open(request, timeout=30) as answer:
                self.text, self.status = unescape(answer.read().decode()), answer.status
        except HTTPError as error:
            with error:
                self.text, self.status = unescape(error.read().decode()), error.code
        return self.status


@pytest.fixture(scope="module")
def worker(module_worker: Callable[..., Worker]) -> Worker:
    return module_worker("tests.admin.apps.desk", pool="threads", concurrency=4)


class Site:
    """`tests.contrib.apps.site`, in a process of its own."""

    def __init__(self, worker: Worker, folder: Path) -> None:
        conf, self._database = worker.module.app.conf, str(folder / "db")
        own = {"RELOCK_TEST_URL": conf.relock_url, "RELOCK_TEST_NAMESPACE": conf.relock_namespace}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.contrib.apps.site", self._database],
            cwd=ROOT,
            env=environment_of(own),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.checks = self._process.stdout.readline()
        self.port = int(self._process.stdout.readline())

    def log(self) -> list[tuple[str, ...]]:
        """The admin log: who did what, to which lock."""
        asked = (
            "select username, object_id, change_message from django_admin_log l "
            "join auth_user u on u.id = l.user_id order by l.id"
        )
        with closing(sqlite3.connect(self._database)) as connection:
            return connection.execute(asked).fetchall()

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def site(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    opened = Site(worker, tmp_path_factory.mktemp("site"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def held(worker: Worker) -> Iterator[Any]:
    """A task that holds a lock with a hostile name, and one that is parked for the lock."""
    first = worker.module.hold.delay(NAME)
    worker.journal.wait_for(f"inside {NAME}")
    second = worker.module.take.delay(NAME)
    locks = Locks(worker.module.app)
    wait_for(lambda: locks.get(NAME).parked, what="the second run to be parked")
    yield first, second
    worker.journal.add(f"go {NAME}")
    first.get(timeout=20)


def page_of(browser: Browser) -> str:
    """Where the list that is open leads to."""
    (link,) = re.findall(rf'href="({LOCKS}[^"]+/change/)"', browser.text)
    return str(link)


def test_a_page_lists_locks_and_a_page_shows_one_to_whoever_may_see(
    worker: Worker, site: Site, held: Any
) -> None:
    first, second = held
    viewer = Browser(site.port, "viewer")

    assert (viewer.status, NAME in viewer.text, first.id in viewer.text) == (200, True, True)
    assert "<b>" not in viewer.text.replace(NAME, "")
    viewer.get(f"{LOCKS}?q=order:")
    assert first.id in viewer.text
    viewer.get(f"{LOCKS}?q=nothing-like-it")
    assert "Nobody holds a lock like" in viewer.text
    for named in (second.id, f"tests.admin.apps.desk.take[{second.id}]", f"odd name[{second.id}]"):
        viewer.get(f"{LOCKS}?{urlencode({'task': named})}")
        assert f"tests.admin.apps.desk.hold[{first.id}] has held it" in viewer.text
    viewer.get(LOCKS)
    assert viewer.get(page_of(viewer)) == 200
    assert first.id in viewer.text
    assert second.id in viewer.text
    assert "Release" not in viewer.text
    [holder] = Locks(worker.module.app).get(NAME).holders
    assert f"<td>{holder.pid} on {holder.host}</td><td>{holder.token}</td>" in viewer.text
    assert viewer.get(f"{LOCKS}nobody-has-it/change/") == 200
    assert "Nobody holds this lock" in viewer.text


def test_the_list_tells_a_holder_that_has_ended_from_one_that_works(
    worker: Worker, site: Site
) -> None:
    tasks, locks = worker.module, Locks(worker.module.app)
    tasks.cools.delay("cold").get(timeout=20)
    tasks.again.delay("of a retry")
    wait_for(
        lambda: locks.get("of a retry").holders[:1] and locks.get("of a retry").holders[0].kept
    )

    viewer = Browser(site.port, "viewer")

    assert "<td>tests.admin.apps.desk.cools (cools down)</td>" in viewer.text
    assert "<td>tests.admin.apps.desk.again (kept)</td>" in viewer.text
    viewer.get(f"{LOCKS}of%20a%20retry/change/")
    assert "<td>kept for the next step, or the retry</td>" in viewer.text
    for name in ("cold", "of a retry"):
        locks.release(name)


def test_the_page_of_a_lock_tells_who_waits_to_share_it(worker: Worker, site: Site) -> None:
    backend = engine_of(worker.module.app).backend
    for run_id, limit in (("alone", 1), ("beside", SHARED)):
        backend.acquire(Claim(run_id, "n", run_id, ("pair",), (limit,), 30.0), 30.0)

    viewer = Browser(site.port, "viewer")
    viewer.get(f"{LOCKS}pair/change/")

    assert "<td>waiting, shared</td>" in viewer.text
    for run_id in ("beside", "alone"):
        backend.release(Release(("pair",), run_id, "n"))


@pytest.mark.parametrize(
    "name", ["order[1]", r"C:\[new]*", "é" * 100, NAME[::-1], "..", ".", "_2E"]
)
def test_what_is_said_of_a_task_leads_to_its_lock_whatever_its_name(
    worker: Worker, site: Site, name: str
) -> None:
    holder = worker.module.hold.delay(name)
    worker.journal.wait_for(f"inside {name}")
    viewer = Browser(site.port, "viewer")
    viewer.get(f"{LOCKS}?task={holder.id}")
    (link,) = re.findall(r'href="([^"]+)">Show the lock', viewer.text)
    status = viewer.get(urljoin(LOCKS, link))  # a browser leaves out what is `.` or `..`
    shown = viewer.text
    worker.journal.add(f"go {name}")
    holder.get(timeout=20)

    assert status == 200
    assert "Held by" in shown
    assert holder.id in shown


def test_a_part_of_a_name_is_no_pattern_unless_it_has_a_star_or_the_like(
    worker: Worker, site: Site
) -> None:
    name = r"C:\new"
    holder = worker.module.hold.delay(name)
    worker.journal.wait_for(f"inside {name}")
    viewer = Browser(site.port, "viewer")
    found = []
    for part in (r":\n", r"\new", "C:\\", "C:?*w", ":n"):
        viewer.get(f"{LOCKS}?{urlencode({'q': part})}")
        found.append(holder.id in viewer.text)
    worker.journal.add(f"go {name}")
    holder.get(timeout=20)

    assert found == [True, True, True, True, False]


@pytest.mark.parametrize(
    "name", ["batch:[1,2]", "order[", r"D:\[new]*", "file:" + "é/" * 60 + "report.csv", "a\xa0b[1]"]
)
def test_a_lock_is_found_by_its_name_whatever_is_in_it(
    worker: Worker, site: Site, name: str
) -> None:
    holder = worker.module.hold.delay(name)
    worker.journal.wait_for(f"inside {name}")
    viewer = Browser(site.port, "viewer")
    found = []
    for pasted in (name, as_shown(name)):
        viewer.get(f"{LOCKS}?{urlencode({'q': pasted})}")
        found.append(viewer.text.count(holder.id))
    viewer.get(page_of(viewer))
    is_there = holder.id in viewer.text
    worker.journal.add(f"go {name}")
    holder.get(timeout=20)
    viewer.get(f"{LOCKS}?{urlencode({'q': name})}")

    assert found == [1, 1]
    assert is_there
    assert "Nobody holds a lock like" in viewer.text


def test_of_more_locks_than_a_page_has_room_for_those_with_waiters_are_shown(
    worker: Worker, site: Site
) -> None:
    app, viewer = worker.module.app, Browser(site.port, "viewer")
    backend, locks = engine_of(app).backend, Locks(app)
    names = [f"many:{number}" for number in range(600)]
    for name in names:
        backend.acquire(Claim(name, name, name, (name,), (1,), 60.0))
    contended = names[::30]
    waiters = [worker.module.take.delay(name) for name in contended]
    for name in contended:
        wait_for(lambda name=name: locks.get(name).parked, what="a task to be parked for each")
    viewer.get(f"{LOCKS}?q=many:")
    shown = re.findall(r'<td class="name"><a[^>]*>([^<]+)</a>', viewer.text)
    for name in names:
        backend.release(Release((name,), name, name))
    for waiter in waiters:
        waiter.get(timeout=20)

    assert shown[:20] == sorted(contended)
    assert len(shown) == 200
    assert "The first 200" in viewer.text


def test_nobody_else_sees_or_frees(site: Site, held: Any) -> None:
    nobody, viewer = Browser(site.port, "nobody"), Browser(site.port, "viewer")
    assert nobody.status == 403
    assert nobody.get(f"{LOCKS}x/change/") == 403
    viewer.get(LOCKS)
    assert viewer.post(f"{LOCKS}free/", what="release", name=NAME, sure="yes") == 403
    freer = Browser(site.port, "freer")
    assert freer.get(f"{LOCKS}free/") == 405, "a link frees nothing"
    freer.get(LOCKS)
    forged = freer.post(f"{LOCKS}free/", token="x" * 64, what="release", name=NAME, sure="yes")
    assert (forged, "CSRF" in freer.text) == (403, True)
    assert held[0].state == states.STARTED


def test_a_redis_that_refuses_is_told_on_the_page(worker: Worker, site: Site, client: Any) -> None:
    root = Browser(site.port, "root")
    meta = f"{worker.namespace}:{{0}}:meta"
    schema = client.hget(meta, "schema")
    client.hset(meta, "schema", 99)
    try:
        assert (root.get(LOCKS), "another layout" in root.text) == (503, True)
    finally:
        client.hset(meta, "schema", schema)
    assert root.get(LOCKS) == 200


def test_a_lock_is_released_and_an_execution_cancelled_once_that_was_confirmed(
    site: Site, held: Any
) -> None:
    first, second = held
    freer = Browser(site.port, "freer")
    form = {"name": NAME, "task": second.id, "what": "cancel"}
    freer.get(page_of(freer))
    assert freer.post(f"{LOCKS}free/", **form) == 200
    assert second.state == "BLOCKED", "it asks first"
    freer.post(f"{LOCKS}free/", **form, sure="yes")
    assert f"Cancelled: {second.id}." in freer.text
    assert second.state == states.REVOKED
    freer.post(f"{LOCKS}free/", **form, sure="yes")
    assert "Nothing to do" in freer.text
    freer.post(f"{LOCKS}free/", name=NAME, what="release", sure="yes")
    assert "Released by force" in freer.text
    assert "Nobody holds this lock" in freer.text
    name = f"tests.admin.apps.desk.hold[{first.id}]"
    assert site.log() == [
        ("freer", NAME, f"Cancelled: {second.id}."),
        ("freer", NAME, f"Released by force: {name}."),
    ]
    freer.post(f"{LOCKS}free/", what="release", sure="yes")
    assert "has no name" in freer.text
    freer.get("/admin/")
    assert "/change/" in freer.text, "an entry of the log leads to its lock"


def test_the_page_of_a_lock_has_its_order_in_the_words_of_the_commands(
    worker: Worker, site: Site
) -> None:
    module, locks = worker.module, Locks(worker.module.app)
    awaited = module.in_order.apply_async(("by turns", "late"), queue="nowhere")
    behind = module.in_order.delay("by turns", "second")
    wait_for(lambda: locks.with_order("by turns")[-1].parked, what="the second call")
    freer = Browser(site.port, "freer")
    for wanted in ("turns", "order of by turns", "order of by t*"):
        freer.get(f"{LOCKS}?{urlencode({'q': wanted})}")
        assert freer.text.count(">order of by turns</a>") == 1, wanted
    freer.get(f"{LOCKS}by turns/change/".replace(" ", "%20"))

    assert "<h2>order of by turns" in freer.text
    assert awaited.id in freer.text
    assert behind.id in freer.text
    form = {"name": "by turns", "task": awaited.id, "what": "cancel"}
    freer.post(f"{LOCKS}free/", **form)
    assert "parked task" not in freer.text, "its message has not come"
    freer.post(f"{LOCKS}free/", **form, sure="yes")
    assert f"Cancelled: {awaited.id}." in freer.text
    assert behind.get(timeout=20) is None
    assert freer.get(f"{LOCKS}order%09by%20turns/change/") == 200
    assert "<h1>order of by turns</h1>" in freer.text


def test_a_release_on_the_page_of_a_lock_is_one_of_its_order_too(
    worker: Worker, site: Site
) -> None:
    first = worker.module.in_order.delay("in turn", "first")
    worker.journal.wait_for("first in turn")
    freer = Browser(site.port, "freer")
    freer.get(f"{LOCKS}in%20turn/change/")
    fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', freer.text))
    del fields["csrfmiddlewaretoken"]
    freer.post(f"{LOCKS}free/", **fields, sure="yes")
    assert f"Released by force: tests.admin.apps.desk.in_order[{first.id}]." in freer.text
    assert all(each.idle for each in Locks(worker.module.app).with_order("in turn"))
    worker.journal.add("go in turn")
    first.get(timeout=20)


def test_who_got_the_lock_while_a_page_was_open_is_not_released(worker: Worker, site: Site) -> None:
    conf = worker.module.app.conf
    shown, other = (
        Lock(conf.relock_url, "turns", namespace=conf.relock_namespace) for _ in range(2)
    )
    assert shown.acquire()
    freer = Browser(site.port, "freer")
    freer.get(f"{LOCKS}turns/change/")
    shown.release()
    assert other.acquire()

    def press() -> None:
        fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', freer.text))
        del fields["csrfmiddlewaretoken"]
        freer.post(f"{LOCKS}free/", **fields)

    press()  # Release for all holders
    press()  # Yes, release

    assert "Nothing to do: it has changed meanwhile" in freer.text
    assert other.owned()
    freer.post(f"{LOCKS}free/", what="release", name="turns", permits="", sure="yes")
    assert other.owned(), "the page had shown that nobody holds it"
    press()
    press()
    assert "Released by force: Lock." in freer.text
    with pytest.raises(LockLost):
        other.release()


def test_the_check_for_deployment_tells_how_the_redis_is_set_up(site: Site) -> None:
    """The tests' servers keep nothing on disk."""
    assert "relock." in site.checks
    assert "keeps nothing on disk" in site.checks
