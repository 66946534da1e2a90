"""What the README says is so: its code runs, its tables are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import _state, chain
from redis.exceptions import LockError

from celery_relock import Lock, errors, locked
from celery_relock.errors import LockConfigError, RelockError
from celery_relock.options import OPTION_NAMES, LockOptions
from celery_relock.settings import option_defaults, store_settings
from tests.support import Journal, RedisServer, Worker, wait_for

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
URL = "redis://localhost:6379"

Start = Callable[..., RedisServer]


def sections() -> dict[str, str]:
    """Heading -> the text below it; the text before the first heading has the heading ""."""
    parts = re.split(r"^## (.+)\n", README, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def python(heading: str) -> str:
    """The one Python block of a section."""
    (block,) = re.findall(r"```python\n(.*?)```", sections()[heading], flags=re.DOTALL)
    return str(block)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table in a section, without its head."""
    lines = [line for line in sections()[heading].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def run(heading: str, url: str, **names: Any) -> dict[str, Any]:
    """Run a section's code with this Redis. Returns the names that it has defined."""
    code = python(heading)
    assert URL in code
    exec(compile(code.replace(URL, url), f"README.md, {heading}", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def _tasks_stay_here() -> Iterator[None]:
    """Celery hands the tasks of every app on to all that come later, in other tests as well."""
    assert locked  # whose own task is every app's
    before = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.intersection_update(before)


@pytest.fixture
def server(own_redis: Start) -> RedisServer:
    """A Redis of its own: the README's code uses the default namespace."""
    return own_redis()


@pytest.fixture
def url(server: RedisServer) -> str:
    return server.url.removesuffix("/0")


@pytest.fixture
def shop(
    url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Worker]:
    """A worker whose app is the README's: its first block and the one of `self.lock`."""
    outside = """
from tests.support import Journal

def entries_of(account_id):
    return ["rent", "food"]

def book(entry, fence):
    Journal.from_env().add("booked", entry=entry, fence=fence)

@app.task
def fetch(number):
    return [number]

@app.task
def parse(found):
    return [*found, "parsed"]

@app.task
def store(found):
    return [*found, "stored"]
"""
    code = python("") + outside + python("`self.lock`")
    (tmp_path / "readme_shop.py").write_text(code.replace(URL, url))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("readme_shop", url, namespace)
    yield worker
    worker.close()


def test_every_python_block_is_run_by_a_test() -> None:
    with_code = [heading for heading, text in sections().items() if "```python" in text]

    workflow, lock = "`locked`, for a whole workflow", "`Lock`, outside of tasks"
    assert with_code == ["", "`self.lock`", workflow, lock, "Settings", "Errors"]


def test_the_first_screen_has_the_code_and_the_commands() -> None:
    screen = README.splitlines()[:30]

    assert screen.index("```") < 25
    assert len(python("").splitlines()) <= 14
    for command in ("pip install celery-relock", "make demo", "make test"):
        assert any(command in line for line in screen), command


def test_the_first_example_deadlocks_with_redis_pys_own_lock(server: RedisServer) -> None:
    client = server.client()
    waited = []
    with client.lock("account:42", timeout=30):
        try:
            with client.lock("account:42", timeout=30, blocking_timeout=0.3):
                waited.append("in")
        except LockError:
            waited.append("out of time")

    assert waited == ["out of time"]


def test_the_first_example_runs_in_a_worker_and_waits_for_others_outside(
    shop: Worker, url: str
) -> None:
    module = shop.module

    assert module.checkout.delay(42).get(timeout=10) == "account 42: 40"

    with Lock(url, "account:42"):
        waits = chain(module.checkout.si(42), module.charge.si(7, 1)).delay()
        first = waits.parent
        wait_for(lambda: first.state == "BLOCKED", what="the run to be parked")
        assert module.checkout.delay(7).get(timeout=10) == "account 7: 40"
        assert first.state == "BLOCKED"
    assert first.get(timeout=20) == "account 42: 40"
    assert waits.get(timeout=20) == "account 7: 1"


@pytest.mark.timeout(20)
def test_the_first_example_runs_as_a_plain_call_too(url: str) -> None:
    names: dict[str, Any] = {}
    exec(python("").replace(URL, url), names)

    assert names["checkout"](42) == "account 42: 40"


def test_the_example_of_self_lock_books_every_entry_under_one_rising_fence(
    shop: Worker, journal: Journal, redis_url: str
) -> None:
    for _ in range(2):
        shop.module.settle.delay(42).get(timeout=10)

    fences = [event["fence"] for event in shop.journal.wait_for("booked", count=4)]
    assert fences[0] == fences[1] < fences[2] == fences[3]


def test_the_example_of_a_workflow_waits_for_its_lock_and_runs_all_its_steps(
    shop: Worker, url: str
) -> None:
    code = python("`locked`, for a whole workflow").replace("locked(steps", "sent = locked(steps")
    module = shop.module
    names = {"fetch": module.fetch, "parse": module.parse, "store": module.store}

    with Lock(url, "account:42"):
        exec(code, names)
        enters = names["sent"].parent.parent.parent
        wait_for(lambda: enters.state == "BLOCKED", what="the workflow to be parked")

    assert names["sent"].get(timeout=20) == [42, "parsed", "stored"]
    assert Lock(url, "account:42").acquire(blocking_timeout=5)


def test_the_examples_of_lock_take_the_lock_and_give_it_back(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run("`Lock`, outside of tasks", url)

    assert int(capsys.readouterr().out) > 0
    assert names["lock"].fence == 0
    assert not names["lock"].locked()
    assert isinstance(names["client"].lock("account:42", lock_class=Lock), Lock)
    names["client"].close()


def test_the_settings_are_read_as_the_readme_says(url: str) -> None:
    names: dict[str, Any] = {}
    exec(python("").replace(URL, url), names)
    app = names["app"]
    assert store_settings(app).url == url
    assert store_settings(app).namespace == "relock"

    run("Settings", url, app=app)

    found = store_settings(app)
    assert (found.url, found.namespace, found.source) == (f"{url}/1", "shop", "relock_url")
    assert option_defaults(app) == {"ttl": 60}
    assert names["charge"](42, 1) == "account 42: 1"
    with redis.Redis.from_url(url) as first, redis.Redis.from_url(f"{url}/1") as second:
        assert first.keys() == []
        assert (kept := second.keys()) != []
        assert all(key.startswith(b"shop:") for key in kept), kept


def test_a_conflict_says_what_the_readme_shows(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Lock(url, "account:42"):
        run("Errors", url, Lock=Lock)

    said = capsys.readouterr().out
    assert re.match(r"the lock 'account:42' is held by .+, its lease has \d+ s left; ", said), said


def test_the_options_table_is_that_of_the_code() -> None:
    defaults = LockOptions.collect({}, {}, "readme")
    table = {name.strip("`"): default.strip("`") for name, default, _ in rows("Options")}

    for name, default in table.items():
        assert ast.literal_eval(default) == getattr(defaults, name.removeprefix("lock_")), name
    assert set(table) == {f"lock_{name}" for name in OPTION_NAMES}


@pytest.mark.parametrize("row", rows("Options"), ids=lambda row: row[0].strip("`"))
def test_every_value_in_the_options_table_can_be_declared(row: list[str]) -> None:
    name, _, meaning = row
    option = name.strip("`")
    words = set(re.findall(r'`"([a-z]+)"`', meaning))

    for word in words:
        assert LockOptions.collect({option: word}, {}, "readme")
    # … and there is no other.
    for word in ("wait", "drop", "descendants", "workflow", "task", "root", "block", "retry"):
        if word not in words and option != "lock_key":  # there any text is a template
            with pytest.raises(LockConfigError):
                LockOptions.collect({option: word}, {}, "readme")


def test_the_errors_table_has_every_error_that_can_come() -> None:
    table = {name.strip("`") for name, *_ in rows("Errors")}
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, RelockError)
    }
    assert table == set(classes) - {"RelockError"}


@pytest.mark.parametrize("page", ["README.md", "docs/README.md"])
def test_every_link_leads_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())

    assert targets
    for target in targets:
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target
