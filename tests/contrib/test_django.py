"""A Django project: what its tests override."""

from __future__ import annotations

import pytest

from tests.support.programs import said_by

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
