"""Acquire, re-enter, release, take turns: in every kind of worker pool."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support import new_namespace
from tests.support.parked import lock_of
from tests.support.permits import permits
from tests.support.programs import said_by

# Not imported: it warns of each fork of the process.
needs_eventlet = pytest.mark.skipif(find_spec("eventlet") is None, reason="eventlet is missing")


@pytest.fixture(scope="module", params=["prefork", "threads", "gevent", "solo"])
def worker(request, module_worker):
    return module_worker(
        "tests.worker.apps.reentry", pool=request.param, concurrency=4, namespace=new_namespace()
    )


@pytest.mark.parametrize("name", ["calls_three_deep", "applies_under_a_direct_call"])
def test_a_task_acquires_its_lock_re_enters_it_and_releases_it(worker, name):
    call = getattr(worker.module, name).delay(name).get(timeout=20)
    fence, owner = call["fence"], call["owner"]
    assert not call["reentered"]
    while call := call["inner"]:
        assert (call["fence"], call["owner"], call["reentered"]) == (fence, owner, True)
        assert call["holds"] == 1
    assert not lock_of(worker, f"account:{name}").locked()


def test_executions_for_one_account_take_turns_and_others_run_beside_them(worker):
    take = worker.module.take
    sent = [take.delay(account, 0.2) for account in ("a", "a", "b", "a")]
    assert all(result.get(timeout=30)["fence"] for result in sent)
    events = worker.journal.events()
    assert len(permits(events, "account:a")) == 3
    assert len(permits(events, "account:b")) == 1


@needs_eventlet
def test_the_eventlet_pool_is_refused_when_the_worker_starts(tmp_path, redis_url):
    (tmp_path / "shop.py").write_text(
        "from celery import Celery\n"
        "from celery_relock import LockedTask\n"
        f"app = Celery('shop', broker={redis_url!r})\n"
        "@app.task(base=LockedTask, lock_key='a')\n"
        "def charge(): ...\n"
    )
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-P", "eventlet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode
    assert "a lock cannot be held under eventlet" in done.stderr


@needs_eventlet
def test_a_lock_is_refused_where_eventlet_has_replaced_threads(redis_url, namespace):
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import eventlet\n"
        "eventlet.monkey_patch()\n"
        "from celery_relock import Lock\n"
        "from celery_relock.errors import LockConfigError\n"
        "lock = Lock(sys.argv[1], 'a', namespace=sys.argv[2])\n"
        "try:\n"
        "    lock.acquire()\n"
        "except LockConfigError as error:\n"
        "    print(error, lock.locked(), sep=';')\n"
    )
    said = said_by(code, redis_url, namespace)
    assert "Use the gevent pool" in said
    assert said.rstrip().endswith(";False")
