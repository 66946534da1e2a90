"""Of each pair of examples in `docs/migrating.md` ours or the original: see RELOCK_TEST_HALF."""

from __future__ import annotations

import importlib.util
import os
import re

import redis

from tests.support import make_app
from tests.support.worker import ROOT

PAGE = ROOT / "docs" / "migrating.md"
_SECTION = re.compile(r"^## From (.+?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^```python\n# ([\w -]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples():
    """Of each section its title, and its two blocks by the words they begin with."""
    page = PAGE.read_text("utf-8")
    return {title: dict(_BLOCK.findall(text)) for title, text in _SECTION.findall(page)}


def installed(title):
    """Whether there is no library to install for a section, or it is there."""
    module = title.replace("-", "_")
    return not title.startswith("celery-") or importlib.util.find_spec(module) is not None


class Cache:
    """As much of Django's cache as the recipe needs."""

    def add(self, key, value, seconds):
        return client.set(f"test-bench:{key}", value, nx=True, ex=seconds)

    def delete(self, key):
        client.delete(f"test-bench:{key}")


redis_url = os.environ.get("RELOCK_TEST_URL")
tasks = {}
if redis_url:
    client = redis.Redis.from_url(redis_url)
    app = make_app(__name__)
    ours = os.environ["RELOCK_TEST_HALF"] == "ours"
    for title, blocks in examples().items():
        known = {"app": app, "redis_url": redis_url, "client": client, "cache": Cache()}
        for word, code in blocks.items():
            if (word == "celery-relock") == ours and (ours or installed(title)):
                names = {**known, "__name__": title}
                exec(code, names)
                tasks[title] = names[re.search(r"^def (\w+)", code, re.MULTILINE)[1]]
