"""Deployments of one app that share a broker and the locks."""

from __future__ import annotations

from tests.support.parked import lock_of, wait_until_parked


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
