"""Real servers, real workers and a journal of what they did: what the tests stand on."""

from tests.support.apps import make_app
from tests.support.journal import Journal
from tests.support.keys import leftovers, new_namespace
from tests.support.redis_server import RedisServer, find_redis_server
from tests.support.waiting import wait_for
from tests.support.worker import Worker

__all__ = [
    "Journal",
    "RedisServer",
    "Worker",
    "find_redis_server",
    "leftovers",
    "make_app",
    "new_namespace",
    "wait_for",
]
