"""Park and resume in the pools that are not processes."""

from __future__ import annotations

import pytest

from tests.support.parked import lock_of, state_of, wait_until_parked


@pytest.mark.parametrize("pool", ["threads", "gevent", "solo"])
def test_an_execution_is_parked_and_resumed_in_every_pool(new_worker, pool):
    one = new_worker("tests.worker.apps.parked", pool=pool, concurrency=2)
    with lock_of(one, "account:pooled"):
        sent = [one.module.takes.delay("pooled") for _ in range(3)]
        wait_until_parked(one, "account:pooled", 3)
        assert one.module.works_beside.delay(5).get(timeout=30) == 5
        assert [result.state for result in sent] == ["BLOCKED"] * 3
    assert {result.get(timeout=30) for result in sent} == {result.id for result in sent}
    assert not state_of(one, "account:pooled").waiting
