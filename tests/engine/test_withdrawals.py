"""A parked execution that is over while Redis is away leaves its line when Redis is back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_relock.engine.protocol import Parked, ParkRequest
from celery_relock.worker.resuming import Resumer
from tests.support import programs, wait_for
from tests.support.proxy import Proxy

PARCEL = ParkRequest("its message", "home", "task")


def test_executions_that_end_while_redis_is_away_leave_the_line_when_it_is_back(
    runs: Callable[..., Any], proxy: Proxy
) -> None:
    process, other = runs(proxy.url, socket_timeout=0.3), runs()
    holder = other.held("a")
    parked = [process.lease("a") for _ in range(3)]
    for lease in parked:
        assert isinstance(process.engine.park(lease, PARCEL), Parked)
    proxy.refuse()
    for lease in parked:
        process.engine.parking.withdraw_later(lease.claim.execution_id)
    assert other.engine.inspect("a").waiting == 3
    proxy.accept()
    wait_for(lambda: other.engine.inspect("a").waiting == 0, what="an empty line")
    other.release(holder)


@pytest.mark.parametrize("by", ["a thread of its own", "a worker"])
def test_one_that_cannot_be_withdrawn_at_all_does_not_keep_back_those_behind_it(
    runs: Callable[..., Any], client: redis.Redis, namespace: str, by: str
) -> None:
    process, other = runs(), runs()
    holder, lease = other.held("a"), process.lease("a")
    process.engine.park(lease, PARCEL)
    bad = process.lease("a").claim.execution_id
    client.hset(f"{namespace}:{{0}}:parked", bad, "of somebody else")
    client.set(f"{namespace}:{{0}}:l:of somebody else", "no lock")
    resumer = Resumer(process.engine, tuple, tuple)
    withdraw = resumer.discard if by == "a worker" else process.engine.parking.withdraw_later
    withdraw(bad)
    withdraw(lease.claim.execution_id)
    if by == "a worker":
        resumer.start()
    wait_for(lambda: other.engine.inspect("a").waiting == 0, what="an empty line")
    resumer.stop()
    other.release(holder)


def test_a_forked_child_withdraws_by_itself_while_its_parent_still_tries(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        from celery_relock.engine.protocol import ParkRequest, Parked
        from tests.support import wait_for
        from tests.support.proxy import Proxy
        from urllib.parse import urlsplit

        proxy = Proxy(urlsplit(URL).port)
        holder, first = engine(), engine(proxy.url)
        held(holder, "a", seconds=30.0)
        mine, own = lease(first, "a"), lease(first, "a")
        for each in (mine, own):
            assert isinstance(first.park(each, ParkRequest("text", "home", "task")), Parked)
        proxy.refuse()
        first.parking.withdraw_later(mine.claim.execution_id)
        child = os.fork()
        if child == 0:
            first.backend.transport._work._options["port"] = urlsplit(URL).port
            first.parking.withdraw_later(own.claim.execution_id)
            wait_for(lambda: engine().inspect("a").waiting == 1, what="the child's own")
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        proxy.accept()
        wait_for(lambda: holder.inspect("a").waiting == 0, what="the parent's own")
        say("done")
        """,
        redis_url,
        namespace,
    )
    assert said == ["done"]
