"""The examples of the migration page run: ours, and the originals that are installed."""

from __future__ import annotations

import re
import uuid

import pytest

from tests.docs import pages
from tests.docs.apps.migrating import examples, installed
from tests.support import new_namespace
from tests.support.worker import ROOT, _import_afresh

# Told when celery-once is compiled, which pip need not have done.
pytestmark = pytest.mark.filterwarnings("ignore:.*invalid escape sequence")

UNIQUE = ["celery-once", "celery-singleton", "celery-heimdall"]
BY_HAND = ["the cookbook's recipe", "a `redis.lock` by hand"]


@pytest.fixture(scope="module")
def ours(module_worker):
    return _worker(module_worker, "ours")


@pytest.fixture(scope="module")
def theirs(module_worker):
    return _worker(module_worker, "theirs")


def _worker(module_worker, half):
    namespace = new_namespace()
    env = {"RELOCK_TEST_HALF": half}
    return module_worker("tests.docs.apps.migrating", concurrency=2, namespace=namespace, env=env)


@pytest.fixture(scope="module", params=["theirs", "ours"])
def half(request):
    return request.param


@pytest.fixture(scope="module")
def calls(request, half):
    """Of each title the name that was called, the results of its call, and of another one for that
    name while the first is queued."""
    tasks, made = request.getfixturevalue(half).module.tasks, {}
    for title, task in tasks.items():
        name = uuid.uuid4().hex
        # On a busy machine seconds can pass between the two.
        made[title] = name, task.apply_async((name,), countdown=5), task.delay(name)
    return made


@pytest.fixture
def called_twice(calls):
    """The results of a call that was made twice."""

    def call(title):
        if title not in calls:
            pytest.skip(f"{title} is not installed")
        name, first, second = calls[title]
        assert first.get(timeout=20) == name
        return first, second

    return call


def test_the_page_has_a_pair_of_examples_for_each_of_them():
    assert [*examples()] == [*UNIQUE, *BY_HAND]
    for title, blocks in examples().items():
        assert {*blocks} == {title if title in UNIQUE else "by hand", "celery-relock"}
    assert len(pages.blocks("migrating")) == 2 * len(examples())


@pytest.mark.parametrize("title", UNIQUE)
def test_a_second_call_is_not_run(called_twice, half, title):
    first, second = called_twice(title)
    if title != "celery-once":
        assert second.id == first.id
    elif half == "ours":
        assert second.get()["of"] == first.id
    else:
        assert (second.id, second.get()) == (None, None)


@pytest.mark.parametrize("title", [title for title in UNIQUE if installed(title)])
def test_old_workers_run_each_call_of_new_senders(theirs, title):
    new = _import_afresh(
        "tests.docs.apps.migrating", {**theirs.settings, "RELOCK_TEST_HALF": "ours"}
    )
    name, task_ids = uuid.uuid4().hex, []
    for _ in range(2):
        result = new.tasks[title].delay(name)
        assert result.get(timeout=20) == name
        task_ids.append(result.id)
    new.app.close()
    assert task_ids[0] != task_ids[1]
    for task_id in task_ids:
        theirs.wait_for_log(f"{task_id}.* succeeded")


@pytest.mark.parametrize("title", BY_HAND)
def test_each_call_is_answered(called_twice, title):
    first, second = called_twice(title)
    assert second.id != first.id
    assert second.get(timeout=20) == first.get()


@pytest.mark.parametrize("page", ["migrating.md", "dedup.md"])
def test_every_link_leads_somewhere(page):
    targets = re.findall(r"\]\(([^)]+)\)", (ROOT / "docs" / page).read_text("utf-8"))
    assert targets
    for target in targets:
        path, _, place = target.partition("#")
        text = (ROOT / "docs" / (path or page)).read_text("utf-8")
        titles = [_anchor(line) for line in text.splitlines() if line.startswith("#")]
        assert not place or place in titles, target


def _anchor(line):
    return re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
