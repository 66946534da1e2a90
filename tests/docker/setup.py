"""The fixtures of the smoke suite: how pytest-celery's setup is made of our nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from pytest_celery import CeleryTestBackend, CeleryTestBroker

from tests.docker.ledger import Ledger
from tests.docker.nodes import APP
from tests.support.worker import _import_afresh

NODES = os.environ.get("SMOKE_NODES") or "process"
if NODES == "docker":
    from tests.docker.containers import *  # noqa: F403
elif NODES == "process":
    from tests.docker.processes import *  # noqa: F403
else:
    raise pytest.UsageError(f"SMOKE_NODES={NODES!r}: it is docker or process")


@pytest.fixture
def broker() -> str:
    """A test that names another one gets it: `@pytest.mark.parametrize("broker", ["rabbitmq"])`."""
    return "redis"


@pytest.fixture
def worker_settings() -> dict[str, str]:
    """More of the environment of the workers."""
    return {}


@pytest.fixture
def celery_broker(broker: str, request: pytest.FixtureRequest) -> CeleryTestBroker:
    return request.getfixturevalue(f"celery_{broker}_broker")


@pytest.fixture
def celery_backend(celery_redis_broker: CeleryTestBroker) -> CeleryTestBackend:
    """The Redis that may be the broker as well. The locks are there."""
    return CeleryTestBackend(celery_redis_broker.container)


@pytest.fixture
def celery_setup_app(
    celery_setup_config: dict[str, Any], celery_worker_cluster: Any
) -> Iterator[Celery]:
    """The workers' app, for the test to send from."""
    app = _import_afresh(APP, {}).app
    app.conf.update(celery_setup_config)
    yield app
    # Results say goodbye to Redis when they are collected, and try for 20 s if it is gone.
    app.backend.result_consumer.subscribed_to.clear()
    app.close()


@pytest.fixture
def ledger(celery_setup_config: dict[str, Any]) -> Iterator[Ledger]:
    opened = Ledger(celery_setup_config["result_backend"])
    yield opened
    opened.close()
