"""Deployments of one app that share a broker and the locks."""

from __future__ import annotations

from functools import partial

from tests.support.parked import is_consumed, lock_of, wait_until_parked
from tests.support.waiting import wait_for


def test_a_parked_message_goes_back_to_the_deployment_that_it_came_from(new_worker, account):
    def deployed(name):
        env = {"RELOCK_TEST_DEPLOYMENT": name}
        return new_worker("tests.worker.apps.deployments", env=env, concurrency=1)

    lock = f"account:{account}"
    deployed("production")
    staging = deployed("staging")
    with lock_of(staging, lock):
        staging.module.charge.delay(account)
        wait_until_parked(staging, lock)
        # Else it is resumed there, and is lost if its body has begun.
        staging.close()
    again = deployed("staging")
    [charged] = again.journal.wait_for("charged")
    assert charged["by"] == "staging"


def test_what_was_parked_is_resumed_where_the_brokers_addresses_are_in_another_order(
    new_worker, account, redis_server
):
    addresses = [f"redis://{host}:{redis_server.port}/0" for host in ("127.0.0.1", "localhost")]

    def deployed(*urls):
        env = {"RELOCK_TEST_DEPLOYMENT": "shop", "RELOCK_TEST_BROKER": ";".join(urls)}
        return new_worker("tests.worker.apps.deployments", env=env, concurrency=1)

    lock = f"account:{account}"
    first = deployed(*addresses)
    is_read = partial(is_consumed, first)
    with lock_of(first, lock):
        first.module.charge.delay(account)
        wait_until_parked(first, lock)
        first.close()
        wait_for(lambda: not is_read(), what="the end of its note that it reads its queue")
        again = deployed(*reversed(addresses))
        wait_for(is_read, what="its consumer")
    again.journal.wait_for("charged")
