"""A Django project: what its tests override."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import said_by
from tests.support.worker import ROOT

pytest.importorskip("django", reason="Django is not installed")

PROJECT = """
import django
from celery import Celery
from django.conf import settings
from django.test import override_settings

from celery_relock import LockedTask
from celery_relock.declaration import engine_of, refuse_late_settings

settings.configure(
    INSTALLED_APPS=["celery_relock.contrib.django"], CELERY_RELOCK_URL="redis://127.0.0.1:1"
)
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
django.setup()

@app.task(base=LockedTask, lock_key="account:{account_id}")
def charge(account_id): ...

def show():
    print(type(engine_of(app).backend).__name__, charge.lock_for(42).timeout)
"""


@pytest.mark.parametrize("before", ["show()", ""])
def test_settings_that_a_test_overrides_apply_inside_its_block_alone(before: str) -> None:
    code = f"""{PROJECT}
{before}
with override_settings(CELERY_RELOCK_URL="memory://", CELERY_RELOCK_TTL=5):
    show()
with override_settings(CELERY_RELOCK_ENABLED=False):
    show()
show()
refuse_late_settings(app)  # as a worker does when it starts
"""
    outside = "RedisBackend 30.0"
    shown = said_by(code).splitlines()
    assert shown == [*([outside] if before else []), "MemoryBackend 5.0", "NoLocks 30.0", outside]


# Uses a lock before the runner forks. A child writes its error itself: the runner cannot pass on a
# traceback on each Python.
TESTS = """
import os, sys
from celery_relock.errors import LockConfigError
from django.test import SimpleTestCase, override_settings
from shop import charge

charge.lock_for(42)

class One(SimpleTestCase):
    def test_it(self):
        try:
            assert charge(42) > 0
        except LockConfigError as error:
            # Not raised: without `tblib` Django cannot send its traceback from process to process,
            # and a pool of Python that fails so can wait for ever as it ends (cpython #73945).
            os.write(sys.__stderr__.fileno(), str(error).encode())

class Two(One):
    pass
"""
SHOP = """
from celery import Celery
from celery_relock import LockedTask

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")

@app.task(bind=True, base=LockedTask, lock_key="account:{account_id}")
def charge(self, account_id):
    return self.lock.fence
"""
# The start method is to be that which Python had for long.
SITE = """
import multiprocessing
from django.conf import settings
from django.core.management import execute_from_command_line
multiprocessing.set_start_method("fork")
settings.configure(
    INSTALLED_APPS=["celery_relock.contrib.django"], CELERY_RELOCK_URL="memory://"
)
import shop
execute_from_command_line(["manage.py", "test", "--parallel", "2"])
"""


@pytest.mark.parametrize("cure", ["", '@override_settings(CELERY_RELOCK_NAMESPACE="tests")'])
def test_a_test_in_a_forked_process_of_djangos_runner_is_told_how_to_have_locks_of_its_own(
    tmp_path: Path, cure: str
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "manage.py").write_text(SITE)
    (tmp_path / "tests.py").write_text(TESTS.replace("class One", f"{cure}\nclass One"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "manage.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    told = "was forked from it" in done.stderr and "override_settings" in done.stderr
    assert told == (not cure), done.stderr


WITHOUT_APP = """
from unittest.mock import MagicMock

import django
from django.conf import settings
from django.test import RequestFactory

settings.configure(
    INSTALLED_APPS=[
        *(f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "sessions")),
        "celery_relock.contrib.django",
    ],
    ROOT_URLCONF="django.contrib.admin.sites",
    CELERY_RELOCK_URL="redis://127.0.0.1:1",
)
django.setup()

from django.contrib import admin
from django.core.checks import run_checks

from celery_relock.contrib.django.admin import LockAdmin
from celery_relock.contrib.django.models import Lock

admin.site.each_context = lambda request: {}
request = RequestFactory().get("/")
request.user = MagicMock()
print(LockAdmin(Lock, admin.site).list_view(request).context_data["error"])
[found] = run_checks(tags=["relock"], include_deployment_checks=True)
print(found.msg)
"""


def test_without_the_app_of_the_project_its_import_is_asked_for_and_not_a_setting() -> None:
    on_page, in_check = said_by(WITHOUT_APP).splitlines()
    for told in (on_page, in_check):
        assert "import it in the project's __init__.py" in told
        assert "Set relock_url" not in told


WITH_A_DATABASE = """
import json
from io import StringIO
from pathlib import Path

import django
from celery import Celery
from django.conf import settings
from django.core.management import call_command
from django.db import connection

settings.configure(
    INSTALLED_APPS=[
        "django.contrib.auth", "django.contrib.contenttypes", "celery_relock.contrib.django"
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    CELERY_RELOCK_URL="redis://127.0.0.1:1",
)
Celery("shop").config_from_object("django.conf:settings", namespace="CELERY")
django.setup()

def told(*words, **options):
    call_command(*words, stdout=(out := StringIO()), **options)
    return out.getvalue()

told("migrate")
told("makemigrations", check=True, dry_run=True)
told("check", databases=["default"])
"""


@pytest.mark.parametrize("words", [(), ("--all",), ("--natural-foreign",), ("celery_relock",)])
def test_what_reads_every_model_finds_no_locks_in_the_database(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    dump = tmp_path / "dump.json"
    code = f"""{WITH_A_DATABASE}
rows = json.loads(told("dumpdata", *{words}))
Path({str(dump)!r}).write_text(json.dumps(rows))
told("flush", interactive=False)
told("loaddata", {str(dump)!r})
print(*sorted({{row["model"] for row in rows}}))
"""
    data = "auth.permission contenttypes.contenttype" if "celery_relock" not in words else ""
    assert said_by(code).strip() == data


def test_a_database_that_djangos_tests_put_back_as_it_was_has_no_locks() -> None:
    code = f"""{WITH_A_DATABASE}
text = connection.creation.serialize_db_to_string()
told("flush", interactive=False)
connection.creation.deserialize_db_from_string(text)
print(sorted({{row["model"] for row in json.loads(text)}}))
"""
    assert said_by(code).strip() == "['auth.permission', 'contenttypes.contenttype']"
