"""Random histories: the scripts on a real Redis, and the backend in memory, do what a plain model
of the lock does; and both do the same where the model does not reach.

`RELOCK_LONG=1 pytest tests/property` goes on for longer; see docs/mutations.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.both import TwoBackends
from tests.property.bursts import BurstMachine
from tests.property.lines import LineMachine
from tests.property.machine import LockMachine
from tests.support import new_namespace
from tests.support.desk import Desk
from tests.support.long import LONG
from tests.support.memory_desk import MemoryDesk

pytestmark = pytest.mark.slow

# To say that something is wrong, and not what: scripts/mutate asks no more.
QUICK = os.environ.get("RELOCK_QUICK", "") not in ("", "0")


@pytest.mark.timeout(7200 if LONG else 240)
def test_redis_and_the_model_agree_and_every_invariant_holds(redis_url):
    pool = redis.ConnectionPool.from_url(redis_url, max_connections=2**31)
    _run(lambda: Desk("", new_namespace(), pool), 200)
    pool.disconnect()


@pytest.mark.timeout(7200 if LONG else 240)
def test_memory_and_the_model_agree_and_every_invariant_holds():
    _run(MemoryDesk, 100)


@pytest.mark.timeout(7200 if LONG else 240)
@pytest.mark.parametrize("where", ["redis", "memory"])
def test_a_line_and_its_model_agree_and_nobody_is_overtaken_unseen(redis_url, where):
    pool = redis.ConnectionPool.from_url(redis_url, max_connections=2**31)
    in_redis = lambda: Desk("", new_namespace(), pool)  # noqa: E731
    _run(in_redis if where == "redis" else MemoryDesk, 30, LineMachine)
    pool.disconnect()


@pytest.mark.timeout(7200 if LONG else 240)
def test_redis_and_memory_agree_when_an_execution_comes_back_for_other_locks(redis_url):
    pool = redis.ConnectionPool.from_url(redis_url, max_connections=2**31)
    _run(lambda: Desk("", new_namespace(), pool), 100, TwoBackends)
    pool.disconnect()


@pytest.mark.timeout(7200 if LONG else 240)
def test_redis_and_memory_agree_on_debounced_calls_and_none_is_lost_or_sent_again(redis_url):
    pool = redis.ConnectionPool.from_url(redis_url, max_connections=2**31)
    _run(lambda: Desk("", new_namespace(), pool), 60, BurstMachine)
    pool.disconnect()


def _run(open_desk: Callable[[], Desk], examples: int, kind: Any = LockMachine) -> None:
    machine = type(kind.__name__, (kind,), {"open_desk": staticmethod(open_desk)})
    phases = (Phase.explicit, Phase.generate) if QUICK else tuple(Phase)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20_000 if LONG else examples,
            stateful_step_count=60 if LONG else 30,
            deadline=None,
            phases=phases,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
