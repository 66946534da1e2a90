"""What people give where a Redis is wanted, and what they are told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import redis.asyncio
from celery import Celery

from celery_relock import Lock
from celery_relock.errors import LockConfigError

DJANGO = """
import sys
from django.conf import settings

settings.configure(CACHES={"default": {
    "BACKEND": "django_redis.cache.RedisCache", "LOCATION": sys.argv[1],
}})
from django.core.cache import cache, caches
from django_redis import get_redis_connection

from celery_relock import Lock
from celery_relock.errors import LockConfigError

with Lock(get_redis_connection("default"), "account:42", namespace=sys.argv[2]) as lock:
    assert lock.fence > 0
for each in (cache, caches["default"]):
    try:
        Lock(each, "account:42")
    except LockConfigError as error:
        print("get_redis_connection" in str(error))
"""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Celery("shop"), r"Lock\(app\.conf\.relock_url, …\), or .* task\.lock_for"),
        (redis.asyncio.Redis(), r"celery_relock\.asyncio\.Lock"),
    ],
    ids=["app", "asyncio"],
)
def test_who_gives_something_near_is_told_what_to_write(given: Any, says: str) -> None:
    with pytest.raises(LockConfigError, match=says):
        Lock(given, "account:42")


def test_a_client_of_django_redis_works_and_a_cache_is_told_from_it(
    redis_url: str, namespace: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DJANGO, redis_url, namespace],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.stdout.split(), done.stderr) == (["True", "True"], "")
