"""What is parked cannot be Looking through: nothing else of a worker's look suffers."""

from __future__ import annotations

import logging
import uuid

import pytest

from celery_relock import engines
from celery_relock.worker import control


@pytest.fixture(autouse=True)
def _a_stamp_is_revoked(monkeypatch):
    monkeypatch.setattr(control, "revoked_stamps", {"batch": ["7"]})
    monkeypatch.setattr(control, "revoked", {"by id"})


def test_a_user_without_hscan_is_told_once(redis_server, namespace, caplog):
    user = f"u{uuid.uuid4().hex[:8]}"
    client = redis_server.client()
    client.execute_command("ACL", "SETUSER", user, "on", ">x", "~*", "&*", "+@all", "-hscan")
    try:
        url = redis_server.url.replace("redis://", f"redis://{user}:x@")
        found = control.Revoked(engines.engine_for(url, namespace).backend)
        with caplog.at_level(logging.WARNING, "celery_relock"):
            assert found() == found() == {"by id"}
    finally:
        client.execute_command("ACL", "DELUSER", user)
    (record,) = caplog.records
    assert "hscan" in record.getMessage()


def test_while_redis_is_away_it_is_tried_again(namespace, caplog):
    found = control.Revoked(engines.engine_for("redis://127.0.0.1:1/0", namespace).backend)
    with caplog.at_level(logging.DEBUG, "celery_relock"):
        assert found() == found() == {"by id"}
    assert sum("Looking through" in record.getMessage() for record in caplog.records) == 2
