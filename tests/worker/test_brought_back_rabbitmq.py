"""A dead-letter queue of RabbitMQ brings back what was rejected, until it is acknowledged."""

from __future__ import annotations

import pytest

from tests.worker.test_brought_back import ENDS_OTHERWISE


@pytest.fixture(scope="module")
def worker(module_worker, on_broker):
    app = "tests.worker.apps.brought_back"
    started = module_worker(app, concurrency=2, env=on_broker("amqp"))
    with started.module.app.connection_for_write() as connection:
        started.module.resting(connection.default_channel).declare()
    return started


@ENDS_OTHERWISE
def test_it_runs_until_it_ends_well(worker, account, name):
    worker.module.tasks["locked", name].delay(account)
    worker.journal.wait_for("began", 20, 3, account=account)


def test_it_runs_though_it_did_not_begin_when_its_turn_came(worker, account):
    worker.module.tasks["ordered", "fails twice before it begins"].delay(account)
    worker.journal.wait_for("began", 20, account=account)
    assert len(worker.journal.events("before", account=account)) == 3
